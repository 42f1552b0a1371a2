"""advice.md and advice.html: a page with the decision for every kind of request, and why."""
import html

_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color-scheme:light dark}
table{border-collapse:collapse;width:100%;display:block;overflow-x:auto}th,td{text-align:left;padding:.3rem .6rem;
border-bottom:1px solid #8886}td.n,th.n{text-align:right}h2{margin-top:2rem}code{font-size:.9em}"""


def headline(advice: dict) -> str:
  """One sentence on all requests."""
  best, types = advice["overall"], advice["types"]
  gain = sum(each["method"] != "plain" for each in types)
  if best["method"] == "plain":
    return (f"Decode plainly by default: no method was faster on all requests together; for {gain} of {len(types)} "
            "kinds of request one is.")
  return (f"Use {best['arm']} by default: {best['measured']:.2f} times plain decoding's speed on held-out requests"
          f"{_interval(best['interval'])}; for {gain} of {len(types)} kinds of request drafting is faster.")


def markdown(advice: dict) -> str:
  """The page as Markdown."""
  lines = [f"# Speculative decoding with {advice['target']}", "", headline(advice), "",
           f"Measured on {advice['device']}, {advice['max_new_tokens']} new tokens at most, up to "
           f"{advice['requests_of_a_half']} requests of each half. Speedups are of whole requests, on held-out ones; "
           "expected is what the cost model says from the other half.", "",
           "| requests | method | settings | expected | measured | 95% interval | memory |",
           "|---|---|---|---:|---:|---|---:|"]
  for row in _rows(advice):
    lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
  for each in advice["types"]:
    lines += ["", f"## {_name(each)}: {each['arm']}", ""]
    lines += [f"- {_sentence(one)}" for one in each["reasons"]] or ["- nothing was tried"]
    lines += [f"- Risk ({one['rule']}): {one['text']}" for one in each["risks"]]
  if advice["left_out"]:
    lines += ["", "## Not tried", ""] + [f"- {one['arm']}: {one['why']}" for one in advice["left_out"]]
  return "\n".join(lines) + "\n"


def page(advice: dict) -> str:
  """The same as one HTML file that needs no network."""
  e = html.escape
  head = ("requests", "method", "settings", "expected", "measured", "95% interval", "memory")
  number = {3, 4, 6}
  cell = lambda tag, i, text: f"<{tag}{' class=n' if i in number else ''}>{e(text)}</{tag}>"
  parts = ["<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
           f"<title>Advice: {e(advice['target'])}</title><style>{_STYLE}</style><main>",
           f"<h1>Speculative decoding with {e(advice['target'])}</h1><p><strong>{e(headline(advice))}</strong></p>",
           f"<p>Measured on {e(advice['device'])}, {advice['max_new_tokens']} new tokens at most, up to "
           f"{advice['requests_of_a_half']} requests of each half. Speedups are of whole requests, on held-out ones; "
           "expected is what the cost model says from the other half.</p><table><thead><tr>",
           *(cell("th", i, text) for i, text in enumerate(head)), "</tr></thead><tbody>"]
  for row in _rows(advice):
    parts.append("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>")
  parts.append("</tbody></table>")
  for each in advice["types"]:
    parts.append(f"<h2>{e(_name(each))}: {e(each['arm'])}</h2><ul>")
    parts += [f"<li>{e(_sentence(one))}</li>" for one in each["reasons"]] or ["<li>nothing was tried</li>"]
    parts += [f"<li>Risk ({e(one['rule'])}): {e(one['text'])}</li>" for one in each["risks"]]
    parts.append("</ul>")
  if advice["left_out"]:
    parts += ["<h2>Not tried</h2><ul>", *(f"<li>{e(one['arm'])}: {e(one['why'])}</li>" for one in advice["left_out"]),
              "</ul>"]
  return "\n".join(parts) + "</main></html>\n"


def _rows(advice):
  number = lambda value: "-" if value is None else f"{value:.2f}"
  for each in [advice["overall"] | {"name": "all", "expected": None}, *advice["types"]]:
    yield (each.get("name") or _name(each), each["arm"],
           " ".join(f"--{k}={v}" for k, v in each["settings"].items()) or "-", number(each["expected"]),
           number(each["measured"]), _interval(each["interval"]).strip(" ()") or "-",
           f"{(each['memory_bytes'] or 0) / 1e6:.0f} MB")


def _name(each):
  return f"{each['category']} ({each['language']})"


def _interval(interval):
  return f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""


def _sentence(one):
  about = "" if one["rule"] == "measured" else f"{one['method']}: "
  return f"{about}{one['text']} [{one['rule']}]"
