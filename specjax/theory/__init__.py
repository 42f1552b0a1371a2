"""What is known without running a model: exact laws of text, bounds, closed forms, known-wrong rules.

- `tables`, `drafts`, `oracle`: the law of the text that a verifier makes of a drafter, exactly, on small tables.
- `draws`: the law of a verifier's fast draw, integrated over its uniforms; the law of races over shared exponentials.
- `worlds`: two steps in a row under a key schedule, exactly.
- `transport`, `closed_forms`: how often drafted tokens can be accepted, and how often the known rules accept them.
- `experts`: how many experts a pass of a mixture goes through at random.
- `negatives`, `wrong_rules`: mistakes that an oracle must catch.
"""
