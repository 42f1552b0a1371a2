"""Draft heads in files: read and written in the formats of those who publish them."""
from specjax.checkpoints.heads.load import kind_of
from specjax.checkpoints.heads.load import load_head
from specjax.checkpoints.heads.load import save_head
from specjax.checkpoints.heads.shipped import shipped

__all__ = ["kind_of", "load_head", "save_head", "shipped"]
