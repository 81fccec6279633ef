"""The two ends of a model that are split by the vocabulary: token embedding, and LM head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tritonllm.kernels.sampling import merge_picks, pick_from_shard, pick_tokens
from tritonllm.kernels.skinny_linear import MAX_ROWS, skinny_linear
from tritonllm.models.linear import copy_checked
from tritonllm.models.parameters import CheckpointTensor
from tritonllm.models.tensor_parallel import TPGroup, vocab_shard


class VocabMatrix(nn.Module):
    """A `[vocab_size, hidden_size]` matrix split by rows over the ranks; padding rows are zero.

    Attributes:
        start: first token of this rank.
        num_held: tokens of this rank, the first rows of its weight.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TPGroup, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.start, length = vocab_shard(vocab_size, tp)
        self.num_held = max(0, min(length, vocab_size - self.start))  # the rest is padding
        self.tied = weight is not None
        self.weight = weight if weight is not None else nn.Parameter(torch.zeros(length, hidden_size), False)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        if not self.tied:
            yield CheckpointTensor("weight", None, (self.vocab_size, self.hidden_size))

    def load_tensor(self, leaf: str, slot: str | None, tensor: torch.Tensor) -> None:
        rows = slice(self.start, self.start + self.num_held)
        copy_checked(self.weight[: self.num_held], tensor, (self.vocab_size, self.hidden_size), leaf, rows)


class VocabEmbedding(VocabMatrix):
    """Token embedding; ids `[T]` to `[T, hidden_size]`. Ids of other ranks' shards contribute zero here.

    Args:
        vocab_size, hidden_size: of the whole matrix.
        tp: the ranks that the rows are split over.
        multiplier: factor on what is looked up, rounded to the weight's dtype first, as transformers does.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TPGroup, multiplier: float = 1.0) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.multiplier = torch.tensor(multiplier, dtype=self.weight.dtype, device="cpu").item()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = self._look_up(input_ids)
        return embedded if self.multiplier == 1.0 else embedded.mul_(self.multiplier)

    def _look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        return self.tp.all_reduce(F.embedding(local * mine, self.weight) * mine[:, None])


class LMHead(VocabMatrix):
    """Hidden states to logits, and hidden states to tokens; with tied embeddings it shares their parameter.

    Args:
        vocab_size, hidden_size: of the whole matrix.
        tp: the ranks that the vocabulary is split over.
        weight: the embedding's parameter, if it is tied to that.
        softcap: bound c of the logits, which become `c * tanh(logit / c)`; None for none.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TPGroup,
        weight: nn.Parameter | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, tp, weight)
        self.softcap = softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[N, hidden_size]` to logits `[N, vocab_size]` in the model's dtype, the same on every rank."""
        logits = self.shard_logits(hidden)
        if self.tp.size == 1:
            return logits
        return self.tp.all_gather(logits).transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def shard_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[N, hidden_size]` to logits `[N, rows of this rank's weight]`; those of padding mean nothing."""
        if 0 < hidden.shape[0] <= MAX_ROWS:
            logits = skinny_linear(hidden, self.weight)
        else:
            logits = F.linear(hidden, self.weight)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def pick_tokens(
        self, hidden: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The token end of the forward pass, for rows that are greedy or use plain temperature.

        The point where the matrix product and the choice may be fused; the token is the one that `forward` followed by
        the sampler gives. int32 `[N]`, the same on every rank. Ranks exchange a score and an id a row, not logits.
        """
        logits = self.shard_logits(hidden)
        if self.tp.size == 1:
            return pick_tokens(logits, temperatures, seeds, positions)
        scores, tokens = pick_from_shard(logits[:, : self.num_held], temperatures, seeds, positions, self.start)
        pairs = self.tp.all_gather(torch.stack([scores.view(torch.int32), tokens]))  # [ranks, 2, N]
        scores, tokens = pairs.permute(1, 2, 0).contiguous()
        return merge_picks(scores.view(torch.float32), tokens)
