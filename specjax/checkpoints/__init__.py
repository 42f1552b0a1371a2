"""Checkpoints: from a name to a decoder's configuration, weights and tokenizer."""
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf import read_gguf
from specjax.checkpoints.load import load
from specjax.checkpoints.pard import pard_token
from specjax.checkpoints.registry import resolve
from specjax.checkpoints.safetensors import read_folder
from specjax.checkpoints.tokenizer import TextStream, Tokenizer

__all__ = ["CheckpointError", "TextStream", "Tokenizer", "load", "pard_token", "read_folder", "read_gguf", "resolve"]
