"""Every proposer of the library, with options that make it draft: what tests of all of them run over.

A new class has to be added; `test_every_drafter_is_in_the_registry` says so.
"""
import dataclasses

import numpy as np

from specjax import proposers
from specjax import static_trees
from specjax import testing
from specjax import verifiers
from specjax.proposers import recycling
from specjax.proposers import shared_tokens
from specjax.testing import tiny
from specjax.training import online
import tiny_tokenizers

VOCAB = 6
CONTEXT = 256  # the first bucket: one program runs up to the last place
TARGET = testing.DummyTarget(vocab=VOCAB, order=2, max_context=CONTEXT)  # texts repeat: lookup has something to find
MODEL = testing.DummyTarget(vocab=VOCAB, order=2, salt=np.uint32(4), max_context=CONTEXT)
DECODER = tiny.decoder(vocab=VOCAB, max_context=CONTEXT)
LETTERS, OTHER_LETTERS = tiny_tokenizers.byte_level("abcdef"), tiny_tokenizers.byte_level("fcabed")
DRAWN = proposers.Drawing(sampled=True)
NGRAM = proposers.NGram(min_ngram=1, num_tokens=3)
SOME = (0, 1, 2, 4)  # the ids that heads draft: never all of them
EAGLE3, MEDUSA, DFLASH = tiny.eagle3(DECODER, SOME), tiny.medusa(DECODER, SOME), tiny.dflash(DECODER, SOME)
DSPARK, EAGLE, MTP = tiny.dspark(DECODER, SOME), tiny.eagle(DECODER, SOME), tiny.mtp(DECODER, SOME)
PEAGLE = tiny.peagle(DECODER, SOME)
HYDRA, HYDRA_PLAIN = tiny.hydra(DECODER, SOME), tiny.hydra(DECODER, SOME, prefix=False)


@dataclasses.dataclass(frozen=True)
class Entry:
  """One way of drafting, and a target that it works on."""
  name: str
  proposer: object
  target: object = TARGET

  @property
  def verifier(self):
    """One that judges its drafts: by q where there is one."""
    if not self.proposer.samples:
      return verifiers.Point()
    return verifiers.Block() if self.proposer.chains else verifiers.Traversal()


ENTRIES = [
    Entry("plain", proposers.Plain()),
    Entry("ngram", NGRAM),
    Entry("ngram earliest", proposers.NGram(max_ngram=2, min_ngram=1, num_tokens=5, match="earliest")),
    Entry("suffix", proposers.Suffix(num_tokens=3)),
    Entry("suffix tree", proposers.Suffix(num_tokens=5, tree=True)),
    Entry("auto lookup", proposers.AutoLookup()),
    Entry("retrieval", proposers.Retrieval.of_texts([[1, 2, 3, 4, 5, 0] * 3, [2, 1, 2, 0, 2, 1]], num_tokens=3)),
    Entry("recycling", recycling.recycling(VOCAB, successors=4, num_nodes=12, acceptance=(0.6, 0.2, 0.1))),
    Entry("jacobi", proposers.Jacobi(num_tokens=3)),
    Entry("lookahead", proposers.Lookahead(window=3, ngram=3, guesses=2, buckets=8)),
    Entry("draft model", proposers.DraftModel(model=MODEL, num_tokens=3)),
    Entry("draft model, drawn", proposers.DraftModel(model=MODEL, num_tokens=3, drawing=DRAWN)),
    Entry("PARD", proposers.Pard(model=MODEL, mask_id=VOCAB - 1, num_tokens=3)),
    Entry("PARD, drawn", proposers.Pard(model=MODEL, mask_id=VOCAB - 1, num_tokens=3, drawing=DRAWN)),
    Entry("PARD tree", proposers.Pard(model=DECODER.keep((0, 1)), mask_id=VOCAB - 1, num_tokens=3, nodes=8, beam=2),
          DECODER),
    Entry("draft tree", proposers.DraftTree(model=MODEL, parents=(0, 0, 0, 1))),
    Entry("draft tree, drawn", proposers.DraftTree(model=MODEL, parents=(0, 0, 0, 1), children="independent")),
    Entry("draft tree, distinct", proposers.DraftTree(model=MODEL, parents=(0, 0, 0, 1), children="without_replacement")),
    Entry("dynamic tree", proposers.DynamicTree(model=MODEL, nodes=8, depth=3, beam=2)),
    Entry("early exit", proposers.EarlyExit(exit_layer=2, num_tokens=3), DECODER),
    Entry("layer skip", proposers.LayerSkip(skipped=(1,), num_tokens=3), DECODER),
    Entry("EAGLE-3", proposers.Eagle(head=EAGLE3, num_tokens=3), DECODER),
    Entry("EAGLE", proposers.Eagle(head=EAGLE, num_tokens=3), DECODER),
    Entry("EAGLE, drawn", proposers.Eagle(head=EAGLE, num_tokens=3, drawing=DRAWN), DECODER),
    Entry("EAGLE tree", proposers.EagleTree(head=EAGLE, nodes=8, depth=3, beam=2), DECODER),
    Entry("EAGLE fixed tree", proposers.EagleFixedTree(head=EAGLE, parents=(0, 0, 0, 1, 1, 3)), DECODER),
    Entry("EAGLE fixed tree, distinct", proposers.EagleFixedTree(head=EAGLE, parents=(0, 0, 0, 1, 1, 3),
                                                                 children="without_replacement"), DECODER),
    Entry("EAGLE-3, drawn", proposers.Eagle(head=EAGLE3, num_tokens=3, drawing=DRAWN), DECODER),
    Entry("EAGLE-3 tree", proposers.EagleTree(head=EAGLE3, nodes=8, depth=3, beam=2), DECODER),
    Entry("MTP", proposers.Eagle(head=MTP, num_tokens=3), DECODER),
    Entry("MTP, drawn", proposers.Eagle(head=MTP, num_tokens=3, drawing=DRAWN), DECODER),
    Entry("MTP tree", proposers.EagleTree(head=MTP, nodes=8, depth=3, beam=2), DECODER),
    Entry("MTP fixed tree", proposers.EagleFixedTree(head=MTP, parents=(0, 0, 0, 1, 1, 3)), DECODER),
    Entry("Medusa", proposers.Medusa(head=MEDUSA, num_tokens=3), DECODER),
    Entry("Medusa, drawn", proposers.Medusa(head=MEDUSA, num_tokens=3, drawing=DRAWN), DECODER),
    Entry("Medusa tree", proposers.Medusa(head=MEDUSA, shape=static_trees.best_first((0.5, 0.2, 0.1), 8, 3)), DECODER),
    Entry("Hydra", proposers.Hydra(head=HYDRA_PLAIN, num_tokens=3), DECODER),
    Entry("Hydra, drawn", proposers.Hydra(head=HYDRA_PLAIN, num_tokens=3, drawing=DRAWN), DECODER),
    Entry("Hydra++, drawn", proposers.Hydra(head=HYDRA, num_tokens=3, drawing=DRAWN), DECODER),
    Entry("Hydra++ tree", proposers.Hydra(head=HYDRA, shape=static_trees.best_first((0.5, 0.2, 0.1), 8, 3)), DECODER),
    Entry("DFlash", proposers.DFlash(head=DFLASH, num_tokens=3), DECODER),
    Entry("DFlash, drawn", proposers.DFlash(head=DFLASH, num_tokens=3, drawing=DRAWN), DECODER),
    Entry("DFlash tree", proposers.DFlash(head=DFLASH, num_tokens=3, nodes=8, beam=2), DECODER),
    Entry("JetSpec", proposers.JetSpec(head=DFLASH, num_tokens=3, nodes=8, beam=3), DECODER),
    Entry("DSpark", proposers.DSpark(head=DSPARK, num_tokens=3), DECODER),
    Entry("DSpark, drawn", proposers.DSpark(head=DSPARK, num_tokens=3, drawing=DRAWN, confidence=0.5), DECODER),
    Entry("DSpark tree", proposers.DSpark(head=DSPARK, num_tokens=3, nodes=8, beam=2), DECODER),
    Entry("P-EAGLE", proposers.PEagle(head=PEAGLE, num_tokens=3), DECODER),
    Entry("P-EAGLE, drawn", proposers.PEagle(head=PEAGLE, num_tokens=3, drawing=DRAWN), DECODER),
    Entry("P-EAGLE tree", proposers.PEagle(head=PEAGLE, num_tokens=3, nodes=8, beam=2), DECODER),
    Entry("fallback on a head", proposers.Fallback((NGRAM, proposers.Eagle(head=EAGLE3, num_tokens=3))), DECODER),
    Entry("shared tokens", shared_tokens.shared_tokens(MODEL, LETTERS, OTHER_LETTERS, num_tokens=3)),
    Entry("retokenised", proposers.Retokenised(MODEL, LETTERS, OTHER_LETTERS, num_tokens=3)),
    Entry("online", online.online(DECODER, proposers.DraftModel(model=DECODER.keep((0, 1)), num_tokens=3)), DECODER),
    Entry("online, drawn", online.online(DECODER, proposers.Medusa(head=MEDUSA, num_tokens=3, drawing=DRAWN)), DECODER),
    Entry("mixture", proposers.Mixture((NGRAM, proposers.DraftModel(model=MODEL, num_tokens=2)))),
    Entry("hierarchical", proposers.Hierarchical(small=NGRAM, middle=MODEL, num_tokens=3)),
    Entry("hierarchical, drawn", proposers.Hierarchical(small=NGRAM, middle=MODEL, num_tokens=3, drawing=DRAWN)),
    # As many nodes as a chain of that depth has, and yet a tree.
    Entry("small dynamic tree", proposers.DynamicTree(model=MODEL, nodes=4, depth=4, beam=2)),
    Entry("fallback on a tree", proposers.Fallback((NGRAM, proposers.DraftTree(model=MODEL, parents=(0, 0, 0, 1))))),
    Entry("fallback", proposers.Fallback((NGRAM, proposers.DraftModel(model=MODEL, num_tokens=3)))),
]
# Not among the public names, for tests only; held to the same.
TESTING = [
    Entry("self", testing.SelfDrafter(3)),
    Entry("always wrong", testing.always_wrong(2)),
    *(Entry(f"noisy {rule}", testing.NoisySelf(parents=(0, 0, 0, 1, 1), rule=rule))
      for rule in ("independent", "without_replacement", "coupled", "greedy_multi")),
    Entry("noisy sparse", testing.NoisySelf(parents=(0, 0, 0), rule="without_replacement", sparse=VOCAB)),
]
