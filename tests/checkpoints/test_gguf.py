"""GGUF files: every storage type, the order of rotary rows, and every way a file can be wrong."""
import dataclasses
import os
import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint_files as files
from specjax.checkpoints import CheckpointError, fields, read_gguf
from specjax.checkpoints.gguf import GGUFSource
from specjax.checkpoints.gguf_families import read_config
from specjax.checkpoints.gguf_header import read_header

# Greatest error of a round trip through each type that can be written here, for values of a few units.
WRITABLE = {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q4_0": 0.7, "Q4_1": 0.35, "Q5_0": 0.4, "Q8_0": 0.025}
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", WRITABLE)
def test_storage_type_round_trip(tmp_path, family, kind):
  model = files.Model(family, tied=family == "llama")
  config, weights = read_gguf(files.write_gguf(tmp_path / "m.gguf", model, kind=kind))
  files.assert_weights(weights, files.expected_fields(model), atol=WRITABLE[kind])
  assert (config.family, config.tied, config.qkv_bias) == (family, family == "llama", family == "qwen2")
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(weights))


@pytest.mark.parametrize("kind", K_TYPES)
def test_k_type_equals_whole_tensor_dequantised(tmp_path, kind, monkeypatch):
  monkeypatch.setattr(fields, "_CHUNK_VALUES", 3 * 256)  # several pieces a tensor, and one that is not whole
  model = files.Model("qwen2")
  number = gguf.GGMLQuantizationType[kind]
  draw = np.random.default_rng(1)
  raw, tensors = {}, dict(model.tensors)
  for name, value in model.tensors.items():
    if value.ndim == 2:
      # Bytes below 60 keep the half-precision scales inside the blocks finite.
      shape = gguf.quants.quant_shape_to_byte_shape(value.shape, number)
      blocks = raw[model.gguf_name(name)] = draw.integers(0, 60, shape, dtype=np.uint8)
      tensors[name] = gguf.dequantize(blocks, number)
  _, weights = read_gguf(files.write_gguf(tmp_path / "m.gguf", model, kind=kind, raw=raw))
  files.assert_weights(weights, files.expected_fields(model, tensors))


@pytest.mark.parametrize("chunk", [1, 700, 1 << 20])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_both_formats_give_identical_trees(tmp_path, monkeypatch, family, chunk):
  from specjax.checkpoints import read_folder
  monkeypatch.setattr(fields, "_CHUNK_VALUES", chunk)
  model = files.Model(family, tied=family == "qwen2", width=64, heads=3, kv_heads=1, head_width=16, mlp_width=96)
  from_gguf = read_gguf(files.write_gguf(tmp_path / "m.gguf", model))
  from_folder = read_folder(files.write_folder(tmp_path / "hf", model))
  assert from_gguf[0] == from_folder[0]
  assert jax.tree.structure(from_gguf[1]) == jax.tree.structure(from_folder[1])
  jax.tree.map(np.testing.assert_array_equal, *(from_gguf[1], from_folder[1]))


def test_rotary_rows_are_put_back():
  # One head of width 6: pairs (0, 3), (1, 4), (2, 5) are stored side by side; a second head alike.
  assert fields.interleaved_rows(2, 12).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_bfloat16_is_kept_and_rounded_once(tmp_path):
  model = files.Model()
  _, weights = read_gguf(files.write_gguf(tmp_path / "m.gguf", model), jnp.bfloat16)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(weights))
  expected = files.expected_fields(model)
  files.assert_weights(weights, {key: value if value is None else jnp.asarray(value).astype(jnp.bfloat16)
                                 for key, value in expected.items()})


def test_weights_outlive_the_reader_and_the_file(tmp_path):
  model = files.Model()
  path = files.write_gguf(tmp_path / "m.gguf", model)
  _, weights = read_gguf(path)
  path.write_bytes(b"\0" * path.stat().st_size)
  garbage = [np.full(1 << 20, 7.0, np.float32) for _ in range(8)]  # would land in memory given back too early
  files.assert_weights(weights, files.expected_fields(model))
  assert len(garbage) == 8


def test_configuration(tmp_path):
  model = files.Model("qwen2", tied=False)
  config, _ = read_gguf(files.write_gguf(tmp_path / "m.gguf", model))
  assert (config.vocab_size, config.num_tokens, config.width, config.layers) == (40, 40, 256, 2)
  assert (config.heads, config.kv_heads, config.head_width, config.mlp_width) == (4, 2, 64, 512)
  assert (config.norm_eps, config.rope_theta, config.max_context) == (1e-5, 100000.0, 512)
  assert (config.rope_layout, config.eos_ids) == ("half", ())


def test_absent_optional_keys_take_their_defaults(tmp_path):
  model = files.Model(heads=4, kv_heads=4)
  without = dict.fromkeys(["attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size",
                           "rope.freq_base", "rope.dimension_count"])
  config, _ = read_gguf(files.write_gguf(tmp_path / "m.gguf", model, metadata=without))
  assert (config.kv_heads, config.head_width, config.vocab_size, config.rope_theta) == (4, 64, 40, 10000.0)


@pytest.mark.parametrize("key, value, says", [
  ("rope.scaling.type", "longrope", "rope.scaling.type is longrope"),
  ("rope.scaling.type", "linear", "rope.scaling.factor is None"),
  ("rope.scaling.factor", 8.0, "rope.scaling.factor"),
  ("expert_count", 8, "expert_used_count"),
  ("attention.sliding_window", 4096, "attention.sliding_window"),
  ("attention.temperature_scale", 2.0, "attention.temperature_scale"),
  ("rope.dimension_count", 32, "rope.dimension_count"),
  ("attention.value_length", 32, "attention.value_length"),
  ("attention.head_count_kv", 3, "not a multiple"),
  ("block_count", None, "block_count"),
  ("block_count", 3, "blk.2.attn_norm.weight"),
  ("block_count", 1 << 30, "block_count"),
  ("embedding_length", 0, "embedding_length"),
  ("attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon"),
])
def test_unsupported_configuration_is_refused_by_name(tmp_path, key, value, says):
  path = files.write_gguf(tmp_path / "m.gguf", files.Model(), metadata={key: value})
  with pytest.raises(CheckpointError, match=says):
    read_gguf(path)


def test_neutral_keys_are_accepted(tmp_path):
  neutral = {"rope.scaling.type": "none", "expert_count": 0}
  assert read_gguf(files.write_gguf(tmp_path / "m.gguf", files.Model(), metadata=neutral))[0].layers == 2


@pytest.mark.parametrize("name", [
  "blk.1.attn_k.weight", "output_norm.weight", "token_embd.weight", "blk.0.attn_q.bias"])
def test_missing_tensor_is_named(tmp_path, name):
  model = files.Model("qwen2")
  tensors = {key: value for key, value in model.tensors.items() if model.gguf_name(key) != name}
  with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
    read_gguf(files.write_gguf(tmp_path / "m.gguf", model, tensors=tensors))


@pytest.mark.parametrize("name, says", [
  ("blk.0.attn_qkv.weight", "nothing of this family uses it"), ("blk.2.attn_q.weight", "nothing of this family"),
  ("blk.0.attn_q.bias", "nothing of this family"), ("rope_factors_long.weight", "Phi-3")])
def test_extra_tensor_is_named(tmp_path, name, says):
  path = files.write_gguf(tmp_path / "m.gguf", files.Model(), extra=[(name, np.ones(32, np.float32))])
  with pytest.raises(CheckpointError, match=f"extra tensor '{name}'.*{says}"):
    read_gguf(path)


def test_misshapen_tensor_is_named(tmp_path):
  model = files.Model()
  name = "model.layers.1.mlp.down_proj.weight"
  tensors = model.tensors | {name: np.ascontiguousarray(model.tensors[name].T)}
  with pytest.raises(CheckpointError, match=r"'blk.1.ffn_down.weight' has shape \(512, 256\).*\(256, 512\)"):
    read_gguf(files.write_gguf(tmp_path / "m.gguf", model, tensors=tensors))


def test_unsupported_storage_type_is_named(tmp_path):
  path = files.write_gguf(tmp_path / "m.gguf", files.Model(), kind="Q5_1")
  with pytest.raises(CheckpointError, match="token_embd.weight.*Q5_1.*supported: F32"):
    read_gguf(path)


def test_unsupported_architecture_is_named(tmp_path):
  model = files.Model()
  model.family = "gemma4"
  with pytest.raises(CheckpointError, match="gemma4.*llama, qwen2"):
    read_gguf(files.write_gguf(tmp_path / "m.gguf", model))


def test_truncated_file_is_refused_wherever_it_ends(tmp_path):
  whole = files.write_gguf(tmp_path / "m.gguf", files.Model(layers=1)).read_bytes()
  cut = tmp_path / "cut.gguf"
  data_start = min(tensor.offset for tensor in read_header(tmp_path / "m.gguf").tensors.values())
  for size in [*range(4, data_start, 97), data_start, data_start + 1000, len(whole) // 2, len(whole) - 1000]:
    cut.write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match="truncated"):
      read_gguf(cut)


def test_truncation_is_found_before_anything_is_read(tmp_path):
  path = files.write_gguf(tmp_path / "m.gguf", files.Model())
  last = max(read_header(path).tensors.values(), key=lambda tensor: tensor.offset)
  os.truncate(path, last.offset + 4)
  with pytest.raises(CheckpointError, match=f"'{last.name}' ends at byte"):
    GGUFSource(read_header(path))
  os.truncate(path, last.offset - 4)
  with pytest.raises(CheckpointError, match=f"'{last.name}' starts at byte"):
    read_header(path)


@pytest.mark.parametrize("content, says", [
  (b"", "not a GGUF file"), (b"PK\3\4 something else", "not a GGUF file"),
  (b"GGUF" + struct.pack("<I", 1), "version 1"),
  (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
  (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "truncated"),
  (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "truncated"),
  (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 60), "truncated"),
  (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "value type 99"),
])
def test_foreign_file_is_refused(tmp_path, content, says):
  path = tmp_path / "m.gguf"
  path.write_bytes(content)
  with pytest.raises(CheckpointError, match=says):
    read_gguf(path)


def test_absent_file_is_refused(tmp_path):
  with pytest.raises(CheckpointError, match="nowhere.gguf.*cannot be read"):
    read_gguf(tmp_path / "nowhere.gguf")


def test_part_of_a_split_file_is_refused(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
  writer.add_uint16("split.count", 3)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  with pytest.raises(CheckpointError, match="split.count"):
    read_gguf(tmp_path / "m.gguf")


def string(text):
  return struct.pack("<Q", len(text)) + text.encode()


def test_what_is_named_twice_is_refused(tmp_path):
  path = tmp_path / "m.gguf"
  key = string("k") + struct.pack("<II", 4, 7)
  path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key * 2)
  with pytest.raises(CheckpointError, match="key 'k' appears twice"):
    read_gguf(path)
  tensor = string("t") + struct.pack("<IQIQ", 1, 4, 0, 0)
  path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + tensor * 2 + bytes(256))
  with pytest.raises(CheckpointError, match="tensor 't' appears twice"):
    read_gguf(path)


@pytest.mark.parametrize("rank, size, offset, says", [
  (9, 4, 0, "9 axes"), (1, 1 << 62, 0, "claims shape"), (1, 4, 8, "multiple of the alignment")])
def test_nonsense_in_the_tensor_table_is_refused(tmp_path, rank, size, offset, says):
  path = tmp_path / "m.gguf"
  tensor = string("t") + struct.pack("<IQIQ", rank, size, 0, offset)
  path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + bytes(256))
  with pytest.raises(CheckpointError, match=says):
    read_gguf(path)


def test_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
  path = files.write_gguf(tmp_path / "m.gguf", files.Model())
  with GGUFSource(read_header(path)) as source:
    assert source.rows("blk.1.ffn_up.weight", 3, 5).shape == (2, 256)
    path.write_bytes(path.read_bytes()[:-1 << 20])
    with pytest.raises(CheckpointError, match="blk.1.ffn_.*truncated"):
      [source.rows(name, 0, 256) for name in ("blk.1.ffn_down.weight", "blk.1.ffn_up.weight", "blk.1.ffn_gate.weight")]


def test_vocabulary_of_the_file(tmp_path):
  path = files.write_gguf(tmp_path / "m.gguf", files.Model())
  header = read_header(path)
  def with_tokens(count, unused):
    return dataclasses.replace(header, metadata=header.metadata | {
      "tokenizer.ggml.tokens": [f"t{index}" for index in range(count)], "tokenizer.ggml.eos_token_id": 7,
      "tokenizer.ggml.token_type": np.array([1] * (count - unused) + [5] * unused)})
  config = read_config(with_tokens(40, 3))
  assert (config.vocab_size, config.num_tokens, config.eos_ids) == (40, 37, (7,))
  with pytest.raises(CheckpointError, match="41 tokens.*only 40 rows"):
    read_config(with_tokens(41, 0))


def test_on_cpu_the_weights_are_the_buffers_that_were_filled(tmp_path, monkeypatch):
  put, seen = jax.device_put, []
  def device_put(buffer, **options):
    array = put(buffer, **options)
    seen.append((array.unsafe_buffer_pointer(), buffer.ctypes.data))
    return array
  monkeypatch.setattr(jax, "device_put", device_put)
  read_gguf(files.write_gguf(tmp_path / "m.gguf", files.Model("qwen2", width=40, head_width=6, mlp_width=33)))
  assert len(seen) == 2 + 7 * 2
  if jax.default_backend() == "cpu":
    assert all(array == buffer for array, buffer in seen)


def test_header_agrees_with_the_package(tmp_path):
  path = files.write_gguf(tmp_path / "m.gguf", files.Model("qwen2"), kind="Q8_0")
  header, reader = read_header(path), gguf.GGUFReader(path)
  assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
  for tensor in reader.tensors:
    mine = header.tensors[tensor.name]
    assert (mine.shape, mine.kind, mine.offset) == (
      tuple(tensor.shape.tolist())[::-1], tensor.tensor_type, tensor.data_offset)
  for key, value in header.metadata.items():
    assert value == reader.fields[key].contents(), key
