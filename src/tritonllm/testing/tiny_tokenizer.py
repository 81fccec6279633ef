"""A real tokenizer that needs no download: byte-level BPE, trained on the few lines below when asked for."""

from __future__ import annotations

from typing import Any

BOS, EOS = "<s>", "</s>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_TEXT = """
A token is a piece of text. A model reads the tokens of a prompt and answers with one more, then with one more again.
The capital of France is Paris, the capital of Japan is Tokyo, and the capital of the Czech Republic is Prague.
Every block of the cache holds the keys and values of some tokens; two prompts with an equal beginning share a block.
When there is no free block left, the newest request waits, and its tokens are computed again once there is room.
The quick brown fox jumps over the lazy dog, and the dog does not care. What is the answer? It is the same as before.
"""


def tiny_tokenizer(vocab_size: int = 512) -> Any:
    """A transformers tokenizer with BOS (id 0), EOS (id 1), three roles and a chat template that writes the BOS itself.

    Any text is encoded and decoded without loss, since every byte is a token; a character outside ASCII takes several.
    Encoding puts one BOS in front.

    Args:
        vocab_size: ids at most; 261 is the least. Merges fill what the bytes leave.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
