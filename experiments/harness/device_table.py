"""What a device check prints: every part in a few lines, and what is synthetic said so."""


def render(found: dict) -> str:
  """The readable table of `device_check.Check.run`."""
  parts, settings = found["parts"], found["settings"]
  writers = {"environment": _environment, "exactness": _exactness, "bandwidth": _bandwidth,
             "collectives": _collectives, "model": _model, "widths": _widths, "speed": _speed}
  lines = [f"specjax device check: size {settings['size']}, {settings['dtype']}, batch {settings['rows']}",
           f"  {found['synthetic']}"]
  for name, part in parts.items():
    lines.append(f"{name}: {part['status']} ({part['seconds']:.1f} s)")
    if part["status"] in ("error", "skipped"):
      lines.append("  " + part.get("error", part.get("reason", "")).splitlines()[0])
      continue
    lines += [f"  {line}" for line in writers[name](part)]
    if part.get("left_out"):
      lines.append(f"  left out, as time was up: {', '.join(map(str, part['left_out']))}")
  return "\n".join(lines)


def _environment(part):
  kinds = sorted(set(part["devices"]))
  return [f"{part['device_count']} x {', '.join(kinds)}, jax {part['packages'].get('jax')}, backend {part['backend']}",
          f"memory a device: {_bytes(part['memory']['limit'])}; host: {part['cpu_model']}, {part['cpu_cores']} cores"]


def _exactness(part):
  lines = []
  for dtype in ("float32", "bfloat16"):
    for name, line in part[dtype].items():
      gap = line["first_difference_gap"]
      lines.append(f"{dtype:9} {name:13} {line['equal_rows']} of {line['rows']} texts equal plain, "
                   f"{line['accepted']} of {line['drafted']} drafts accepted"
                   + ("" if gap is None else f", top-2 gap at a first difference {gap:.1e}, where {dtype} has steps of "
                      f"{line['step_of_the_type']:.1e}"))
  return lines


def _bandwidth(part):
  known = "not in the table" if part["published"] is None else f"{part['published'] / 1e9:.0f} GB/s"
  measured = [f"{name} {part[name] / 1e9:.1f} GB/s" for name in ("sum", "multiply", "copy")]
  return [", ".join(measured) + f", published {known}"]


def _collectives(part):
  return [f"{part['devices']} devices, all-reduce {part['dtype']}[{line['rows']}, {line['nodes']}, {part['width']}] "
          f"({_bytes(line['bytes'])}): {line['microseconds']:.1f} us ({line['least']:.1f} to {line['greatest']:.1f})"
          for line in part["all_reduce"]]


def _model(part):
  return [f"{part['parameters'] / 1e6:.0f} M random parameters, {_bytes(part['weight_bytes'])} in {part['dtype']}"]


def _widths(part):
  return [f"width {line['width']:2}: {line['median_ms']:9.3f} ms a step ({line['least_ms']:.3f} to "
          f"{line['greatest_ms']:.3f}, {line['samples']} samples), {line['ratio']:.2f} of width 1"
          for line in part["curve"]]


def _speed(part):
  lines = []
  for name, arm in part["arms"].items():
    bounds = "; ".join(f"{bound['share']:.0%} of {bound['tokens_per_second']:.1f} by the {source} bandwidth"
                       for source, bound in arm["bounds"].items())
    lines.append(f"{name:9} {arm['tokens_per_second']:9.2f} tokens/s ({arm['least']:.2f} to {arm['greatest']:.2f}), "
                 f"{arm['tokens_per_step']:.2f} tokens a step, {arm['step']['median_ms']:.3f} ms a step"
                 + (f"; {bounds}" if bounds else ""))
  law = ", ".join(f"{x:g}" for x in part["acceptance"])
  lines.append(f"synthetic acceptance {law}: {part['expected_tokens_per_step']:.2f} tokens a step expected")
  if "speedup" in part:
    predicted = part.get("predicted_speedup_of_free_drafts")
    lines.append(f"synthetic speedup {part['speedup']:.2f}" + (
        "" if predicted is None else f"; the width curve predicts {predicted:.2f} for drafts that cost nothing"))
  return lines


def _bytes(count):
  if count is None:
    return "not known"
  for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= size:
      return f"{count / size:.2f} {unit}"
  return f"{count} bytes"
