"""The errors a user can meet. Each message is one sentence with the offending value, and says what to do."""

from __future__ import annotations


class TritonLLMError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(TritonLLMError, ValueError):
    """A configuration key or value is wrong, unknown, or contradicts the checkpoint."""


class UnsupportedModelError(ConfigError):
    """A checkpoint asks for mathematics that this engine does not do; names the field and its value."""


class UnknownModelError(TritonLLMError, LookupError):
    """No registered model serves this checkpoint."""


class DuplicateModelError(TritonLLMError, ValueError):
    """Two plugins claim the same checkpoint or architecture."""


class PluginError(TritonLLMError):
    """A plugin could not be loaded or broke the contract."""


class CheckpointError(TritonLLMError):
    """A checkpoint is missing, incomplete or malformed; lists the names."""


class RequestError(TritonLLMError, ValueError):
    """A prompt or its sampling parameters cannot be served; names the index of the prompt."""


class KernelError(TritonLLMError, ValueError):
    """A kernel was called with tensors it cannot take; names the op, the argument and its shape."""


class EngineError(TritonLLMError, RuntimeError):
    """The engine cannot go on, or was used after `exit()`."""
