"""The model: the kit's decoder with one switch."""

from tritonllm.models.decoder import DecoderLayer, DecoderLM


class ToyLayer(DecoderLayer):
    """A pre-norm block whose query and key heads are normalised before they are rotated."""

    qk_norm = True


class ToyForCausalLM(DecoderLM):
    """Embedding, `ToyLayer`s, norm and head, with weights named as in the checkpoint."""

    layer_class = ToyLayer
