"""How often one of k drafted tokens can be accepted at best, and how often the known rules accept one.

With k candidates S drawn below one node, a lossless rule is a coupling of S with a token y ~ p, and accepts when y is
in S. The best coupling is a linear program (`optimal_by_program`); its dual is alpha* = 1 + min over H of
p(H) - Q_k(H), where Q_k(H) is the chance that all candidates lie in H, and the best H is a prefix of the tokens sorted
by q / p (`optimal`; Hu et al., arXiv 2502.18779; Khisti et al., arXiv 2410.18234). Sampling the candidates without
replacement matters more than the rule that verifies them.

Everything here is for laws p, q f64[V] small enough to enumerate. `replacement` as in `TokenTree`.
"""
import itertools

import numpy as np
from scipy import optimize


def candidates(q: np.ndarray, k: int, replacement: bool) -> dict[tuple[int, ...], float]:
  """The law of the k drafted tokens, in the order of their drawing; fewer where q's support ends."""
  law = {(): 1.0}
  for _ in range(k):
    longer = {}
    for drawn, mass in law.items():
      left = np.array(q, np.float64)
      if not replacement:
        left[list(drawn)] = 0
      if left.sum() <= 0:
        longer[drawn] = longer.get(drawn, 0.0) + mass
        continue
      for token in np.nonzero(left)[0]:
        longer[(*drawn, int(token))] = mass * left[token] / left.sum()
    law = longer
  return law


def greedy_candidates(q: np.ndarray, k: int) -> dict[tuple[int, ...], float]:
  """The law of the k candidates of greedy multi-draft: the k - 1 most probable tokens and a draw from the rest."""
  top = tuple(int(token) for token in np.argsort(-np.asarray(q), kind="stable")[:k - 1])
  rest = np.array(q, np.float64)
  rest[list(top)] = 0
  return {(*top, int(token)): rest[token] / rest.sum() for token in np.nonzero(rest)[0]}


def optimal(p: np.ndarray, q: np.ndarray, k: int, replacement: bool) -> float:
  """The best acceptance of k candidates, in closed form."""
  with np.errstate(divide="ignore", invalid="ignore"):
    order = np.argsort(-np.where(np.asarray(p) > 0, np.divide(q, p), np.inf), kind="stable")
  law, best = candidates(q, k, replacement), 0.0
  for size in range(1, len(order) + 1):
    inside = set(order[:size].tolist())
    together = sum(mass for drawn, mass in law.items() if inside.issuperset(drawn))
    best = min(best, sum(p[token] for token in inside) - together)
  return 1 + best


def optimal_by_program(p: np.ndarray, law: dict[tuple[int, ...], float]) -> float:
  """The best acceptance of candidates with a `law`, as a linear program over couplings with y ~ p."""
  drawn, size = list(law), len(p)
  gain = np.zeros((len(drawn), size))
  for row, tokens in enumerate(drawn):
    gain[row, list(tokens)] = 1
  rows, columns = np.kron(np.eye(len(drawn)), np.ones(size)), np.kron(np.ones(len(drawn)), np.eye(size))
  return _greatest(gain.ravel(), np.concatenate([rows, columns]), np.concatenate([[law[x] for x in drawn], p]))


def single(p: np.ndarray, q: np.ndarray) -> float:
  """One candidate: sum of min(p, q), which is 1 - TV."""
  return float(np.minimum(p, q).sum())


def naive(p: np.ndarray, q: np.ndarray, k: int, replacement: bool) -> float:
  """Draw y ~ p and accept it if it is among the candidates."""
  law = candidates(q, k, replacement)
  return float(sum(mass * sum(p[token] for token in set(drawn)) for drawn, mass in law.items()))


def recursive(p: np.ndarray, q: np.ndarray, k: int, replacement: bool) -> float:
  """Recursive rejection: each candidate in turn against what the earlier ones left of p (and, without replacement, of
  q). SpecInfer (arXiv 2305.09781) with, Sequoia (arXiv 2402.12374) without replacement."""
  accepted = 0.0
  for drawn, mass in candidates(q, k, replacement).items():
    target, law, missed = np.array(p, np.float64), np.array(q, np.float64), 1.0
    for token in drawn:
      missed *= 1 - min(1.0, target[token] / law[token])
      if missed <= 0:
        break
      target = np.maximum(target - law, 0)
      target /= target.sum()
      if not replacement:
        law[token] = 0
        law = law / law.sum() if law.sum() > 0 else law
    accepted += mass * (1 - missed)
  return float(accepted)


def k_seq(p: np.ndarray, q: np.ndarray, k: int) -> tuple[float, float]:
  """rho* and the acceptance of k-SEQ (SpecTr, arXiv 2310.15141), candidates drawn with replacement."""
  overlap = lambda rho: float(np.minimum(q, np.divide(p, rho)).sum())
  low, high = 1.0, float(k)
  for _ in range(100):
    rho = (low + high) / 2
    low, high = (rho, high) if 1 - (1 - overlap(rho)) ** k > rho * overlap(rho) else (low, rho)
  return low, 1 - (1 - overlap(low)) ** k


def greedy_multi(p: np.ndarray, q: np.ndarray, k: int) -> float:
  """Greedy multi-draft (arXiv 2502.18779): the k - 1 tokens of greatest q, and one drawn from the rest."""
  p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
  top = np.argsort(-q, kind="stable")[:k - 1]
  rest = np.setdiff1d(np.arange(len(q)), top)
  left = q[rest].sum()
  return float(p[top].sum() + (np.minimum(p[rest], q[rest] / left).sum() if left > 0 else 0))


def top_k(p: np.ndarray, q: np.ndarray, k: int) -> float:
  """The k tokens of greatest q as points: their p."""
  return float(np.asarray(p)[np.argsort(-np.asarray(q), kind="stable")[:k]].sum())


def coupled(p: np.ndarray, q: np.ndarray) -> float:
  """How often two races over the same exponentials agree: sum over v of 1 / sum over w of max(p_w / p_v, q_w / q_v)."""
  both = [v for v in range(len(p)) if p[v] > 0 and q[v] > 0]
  return float(sum(1 / np.maximum(np.divide(p, p[v]), np.divide(q, q[v])).sum() for v in both))


def coupled_bound(p: np.ndarray, q: np.ndarray) -> float:
  """The guarantee for that agreement, (1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978)."""
  return single(p, q) / (2 - single(p, q))


def single_path_by_program(target: tuple[np.ndarray, ...], draft: tuple[np.ndarray, ...], gamma: int) -> float:
  """The most drafted tokens that any lossless rule for one path of `gamma` tokens accepts, as a linear program.

  The rule may look at the whole path before it decides where to stop. Unknown is the mass m(path, stop, new token).

  Args:
    target, draft: laws after every context, f64[V ** d, V] for d = 0 .. gamma at least.
  """
  vocabulary = target[0].shape[1]
  paths = list(itertools.product(range(vocabulary), repeat=gamma))
  texts = {text: at for at, text in enumerate(itertools.product(range(vocabulary), repeat=gamma + 1))}
  number = lambda tokens: sum(token * vocabulary ** place for place, token in enumerate(reversed(tokens)))
  chance = lambda laws, text, known=0: np.prod([laws[d][number(text[:d]), text[d]] for d in range(known, len(text))])
  unknowns = list(itertools.product(paths, range(gamma + 1), range(vocabulary)))
  drafted, emitted = np.zeros((len(paths), len(unknowns))), np.zeros((len(texts), len(unknowns)))
  for column, (path, stop, token) in enumerate(unknowns):
    drafted[paths.index(path), column] = 1
    known = (*path[:stop], token)
    for rest in itertools.product(range(vocabulary), repeat=gamma - stop):
      emitted[texts[*known, *rest], column] = chance(target, (*known, *rest), len(known))
  goal = np.concatenate([[chance(draft, path) for path in paths], [chance(target, text) for text in texts]])
  return _greatest(np.array([float(stop) for _, stop, _ in unknowns]), np.concatenate([drafted, emitted]), goal)


def _greatest(gain, equal, to):
  """The greatest gain.x over x >= 0 with equal @ x = to; the last equation follows from the others."""
  found = optimize.linprog(-gain, A_eq=equal[:-1], b_eq=to[:-1])
  if found.status:
    raise ValueError(f"the linear program has no solution: {found.message}")
  return float(-found.fun)
