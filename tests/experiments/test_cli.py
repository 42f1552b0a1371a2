"""How programs start and fail: every flag reaches the run and its record; bad input is one message and exit code 2."""
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from experiments.harness import cli
from experiments.harness import distributed
import many_processes
import programs
import specjax
from specjax import checkpoints
from specjax.checkpoints import heads
from specjax.proposers import retrieval
from specjax.testing import tiny

# Stands in for the job: prints what the program made of its flags, and ends.
CAPTURE = """
import json
import jax
import specjax
from experiments.harness import job, methods, settings, sharded
class Captured:
  def __init__(self, target, names, requests, *, verifier, **given):
    params = settings.sampling_params()
    tiny, tokenizer = sharded.load("TINY")
    built = methods.build_all(names, methods.Given(tiny, tokenizer, "tiny"))
    self.name = lambda p: jax.tree.map(lambda x: jax.numpy.shape(x) or float(x), p)
    defined = sys.modules["absl.flags"].FLAGS.flags_by_module_dict().items()
    ours = [f.name for m, fs in defined for f in fs if m.startswith("experiments.") or m == sys.argv[0]]
    print(json.dumps(given | {
        "target": target, "methods": {name: repr(self.name(p)) for name, p in built.items()}, "flags": ours,
        "requests": [[r.id, r.category, r.language, r.source] for r in requests],
        "verifier": repr(verifier), "all_params": repr(params),
        "joined": jax.distributed.is_initialized(),
        "max_new_tokens": settings.MAX_NEW_TOKENS.value, "key": jax.random.key_data(settings.random_key()).tolist(),
        "params": [params.temperature, params.top_k, params.top_p, params.min_p]}))
    sys.exit(0)
job.Job = Captured
""".replace("TINY", programs.TINY)

# Every flag of the benchmark with another value than its default, and what must change for it. "config" names the
# setting in config.json; those of `job._NOT_SETTINGS` say how to run, not what, and stand in the recorded command only.
FLAGS = {
    "target": ("x/y", lambda got: got["target"] == "x/y"),
    "methods": ("ngram", lambda got: list(got["methods"]) == ["ngram"]),
    "workload": ("{dir}/two.jsonl", lambda got: [r[0] for r in got["requests"]] == ["a", "b"]),
    "categories": ("code,json", lambda got: {r[1] for r in got["requests"]} == {"code", "json"}),
    "languages": ("ko", lambda got: {r[2] for r in got["requests"]} == {"ko"}),
    "limit": ("2", lambda got: len(got["requests"]) == 26),
    "temperature": ("0.5", lambda got: got["params"] == [0.5, 0, 1.0, 0.0]),
    "top_k": ("7", lambda got: got["params"] == [0.0, 7, 1.0, 0.0]),
    "top_p": ("0.25", lambda got: got["params"] == [0.0, 0, 0.25, 0.0]),
    "min_p": ("0.125", lambda got: got["params"] == [0.0, 0, 1.0, 0.125]),
    "max_new_tokens": ("33", lambda got: got["max_new_tokens"] == 33),
    "batch_size": ("5", lambda got: got["batch_size"] == 5),
    "draft_tokens": ("4", lambda got: "num_tokens=4" in got["methods"]["ngram"]),
    "max_ngram": ("9", lambda got: "max_ngram=9" in got["methods"]["ngram"]),
    "min_ngram": ("1", lambda got: "min_ngram=1" in got["methods"]["ngram"]),
    "ngram_match": ("earliest", lambda got: "earliest" in got["methods"]["ngram"]),
    "ngram_source": ("prompt", lambda got: "source='prompt'" in got["methods"]["ngram"]),
    "ngram_overlap": ("true", lambda got: "overlap=True" in got["methods"]["ngram"]),
    "lookup_tree": ("true", lambda got: "tree=True" in str(got["methods"].get("suffix"))),
    "suffix_min_score": ("0.5", lambda got: "min_score=0.5" in str(got["methods"].get("suffix"))),
    "suffix_store": ("64", lambda got: "Store(tokens=(64,)" in str(got["methods"].get("suffix"))),
    "datastore": ("{dir}/store.npz", lambda got: "suffix_array=(9,)" in str(got["methods"].get("retrieval"))),
    "eagle_head": ("{dir}/eagle", lambda got: "Eagle(head=EagleHead(" in str(got["methods"].get("eagle"))),
    "eagle3_head": ("{dir}/eagle3", lambda got: "Eagle(head=Eagle3Head(" in str(got["methods"].get("eagle3"))),
    "medusa_head": ("{dir}/medusa", lambda got: "Medusa(head=MedusaHead(" in str(got["methods"].get("medusa"))),
    "hydra_head": ("{dir}/hydra", lambda got: "Hydra(head=HydraHead(" in str(got["methods"].get("hydra"))),
    "dflash_head": ("{dir}/dflash", lambda got: "DFlash(head=DFlashHead(" in str(got["methods"].get("dflash"))),
    "dspark_head": ("{dir}/dspark", lambda got: "DSpark(head=DSparkHead(" in str(got["methods"].get("dspark"))),
    "peagle_head": ("{dir}/peagle", lambda got: "PEagle(head=PEagleHead(" in str(got["methods"].get("peagle"))),
    "pard_model": ("{dir}/pard", lambda got: "Pard(model=Decoder(" in str(got["methods"].get("pard"))),
    "dspark_confidence": ("0.5", lambda got: "confidence=0.5" in str(got["methods"].get("dspark"))),
    "mtp_head": ("{dir}/mtp", lambda got: "Eagle(head=MtpHead(" in str(got["methods"].get("mtp"))),
    "draft": (programs.TINY, lambda got: "Decoder(" in str(got["methods"].get("draft_model"))),
    "draft_sampled": ("true", lambda got: "sampled=True" in str(got["methods"].get("early_exit"))),
    "draft_temperature": ("0.5", lambda got: "temperature=0.5" in str(got["methods"].get("early_exit"))),
    "draft_top_k": ("3", lambda got: "top_k=3" in str(got["methods"].get("early_exit"))),
    "draft_top_p": ("0.75", lambda got: "top_p=0.75" in str(got["methods"].get("early_exit"))),
    "draft_length": ("heuristic", lambda got: "Heuristic(" in str(got["methods"].get("early_exit"))),
    "confidence_threshold": ("0.25", lambda got: "threshold=0.25" in str(got["methods"].get("early_exit"))),
    "exit_layer": ("1", lambda got: "exit_layer=1" in str(got["methods"].get("early_exit"))),
    "skip_layers": ("1", lambda got: "skipped=(1,)" in str(got["methods"].get("layer_skip"))),
    "tree_nodes": ("9", lambda got: "nodes=9" in str(got["methods"].get("dynamic_tree"))),
    "tree_depth": ("2", lambda got: "depth=2" in str(got["methods"].get("dynamic_tree"))),
    "tree_beam": ("3", lambda got: "beam=3" in str(got["methods"].get("dynamic_tree"))),
    "tree_shape": ("3,1", lambda got: "parents=(0, 0, 0, 0, 1, 2, 3)" in str(got["methods"].get("draft_tree"))),
    "tree_acceptance": ("0.9,0.01", lambda got: "parents=(0, 0, 1, 2, 3" in str(got["methods"].get("draft_tree"))),
    "tree_children": ("independent", lambda got: "children='independent'" in str(got["methods"].get("draft_tree"))),
    "fallback": ("suffix,ngram", lambda got: "Fallback(proposers=(Suffix(" in str(got["methods"].get("fallback"))),
    "lookahead_window": ("3", lambda got: "window=3" in str(got["methods"].get("lookahead"))),
    "lookahead_ngram": ("3", lambda got: "ngram=3" in str(got["methods"].get("lookahead"))),
    "lookahead_guesses": ("3", lambda got: "guesses=3" in str(got["methods"].get("lookahead"))),
    "hierarchical_small": ("suffix", lambda got: "small=Suffix(" in str(got["methods"].get("hierarchical"))),
    "mixture": ("suffix,ngram", lambda got: "Mixture(proposers=(Suffix(" in str(got["methods"].get("mixture"))),
    "online": ("medusa", lambda got: "Online(inner=Medusa(" in str(got["methods"].get("online"))),
    "online_requests": ("3", lambda got: "tokens=(3, 512)" in str(got["methods"].get("online"))),
    "online_steps": ("7", lambda got: "steps=7" in str(got["methods"].get("online"))),
    "online_rate": ("0.25", lambda got: "learning_rate=0.25" in str(got["methods"].get("online"))),
    "verify_costs": ("1,1,1,2,3,4", lambda got: "verify_costs=(1.0, 1.0, 1.0, 2.0, 3.0, 4.0)" in
                     str(got["methods"].get("auto_lookup"))),
    "draft_cost": ("0.125", lambda got: "draft_cost=0.125" in str(got["methods"].get("early_exit"))),
    "pair": ("qwen2.5-coder", lambda got: got["target"] == "qwen2.5-coder-1.5b"),
    "preset": ("{dir}/advice.json", lambda got: (got["target"], list(got["methods"])) == ("x/y", ["plain", "suffix"])),
    "repeats": ("3", lambda got: got["repeats"] == 3),
    "raw": ("true", lambda got: got["raw"] is True),
    "repetition_penalty": ("1.25", lambda got: "repetition_penalty=1.25" in got["all_params"]),
    "presence_penalty": ("0.5", lambda got: "presence_penalty=0.5" in got["all_params"]),
    "frequency_penalty": ("-0.5", lambda got: "frequency_penalty=-0.5" in got["all_params"]),
    "logit_bias": ("5:2,6:-inf", lambda got: "logit_bias={5: 2.0, 6: -inf}" in got["all_params"]),
    "banned_ids": ("7,8", lambda got: "banned_ids=[7, 8]" in got["all_params"]),
    "allowed_ids": ("9,10", lambda got: "allowed_ids=[9, 10]" in got["all_params"]),
    "min_new_tokens": ("3", lambda got: "min_new_tokens=3" in got["all_params"]),
    "verifier": ("block", lambda got: got["verifier"] == "Block()"),
    "typical_epsilon": ("0.5", lambda got: got["verifier"] == "LossyTypical(epsilon=0.5, alpha=0.3)"),
    "typical_alpha": ("0.5", lambda got: got["verifier"] == "LossyTypical(epsilon=0.09, alpha=0.5)"),
    "lenience": ("0.25", lambda got: got["verifier"] == "LossyLenient(lenience=0.25)"),
    "cascade_rule": ("opt", lambda got: got["verifier"] == "LossyCascade(rule='opt', alpha=0.1)"),
    "cascade_alpha": ("0.25", lambda got: got["verifier"] == "LossyCascade(rule='token', alpha=0.25)"),
    "seed": ("6", lambda got: got["key"] == [0, 6]),
    "outdir": ("some/where", lambda got: got["outdir"] == "some/where"),
    "overwrite": ("true", lambda got: got["overwrite"] is True),
    "resume": ("true", lambda got: got["resume"] is True),
    "quality": ("true", lambda got: got["quality"] is True),
    "run_code": ("true", lambda got: got["run_code"] is True),
    "costs": ("false", None),  # see test_benchmark
    "trace": ("1", None),  # see test_benchmark
    "coordinator": (f"127.0.0.1:{many_processes.free_port()}", lambda got: got["joined"]),
    "num_processes": ("1", lambda got: got["joined"]),
    "process_id": ("0", lambda got: got["joined"]),
    "coordinator_timeout": ("99", lambda got: got["joined"]),  # what they do: see test_distributed
    "heartbeat_timeout": ("99", lambda got: got["joined"]),
    "distributed": ("on", lambda got: got["joined"]),
    # What they do: see test_sharded_programs.
    "mesh": ("data:1,model:1", None),
    "draft_sharding": ("divided", None),
    "must_divide": ("mlp", None),
}
# Flags that mean something beside another only; plain alone goes with every verifier.
WITH = {"typical_epsilon": ["--verifier=lossy_typical"], "typical_alpha": ["--verifier=lossy_typical"],
        "lenience": ["--verifier=lossy_lenient"], "cascade_rule": ["--verifier=lossy_cascade", "--methods=plain"],
        "cascade_alpha": ["--verifier=lossy_cascade", "--methods=plain"]}
WITH |= {name: ["--methods=suffix"] for name in ("lookup_tree", "suffix_min_score", "suffix_store")}
WITH |= {"datastore": ["--methods=retrieval"], "skip_layers": ["--methods=layer_skip"],
         "fallback": ["--methods=fallback"], "draft": ["--methods=draft_model"]}
WITH |= {name: ["--methods=early_exit"] for name in ("draft_sampled", "draft_length", "exit_layer")}
WITH |= {name: ["--methods=early_exit", "--draft_sampled=true"]
         for name in ("draft_temperature", "draft_top_k", "draft_top_p")}
WITH |= {f"{name}_head": [f"--methods={name}"] for name in ("eagle", "eagle3", "medusa", "hydra", "dflash", "dspark",
                                                              "mtp", "peagle")}
WITH["pard_model"] = ["--methods=pard"]
WITH["dspark_confidence"] = ["--methods=dspark", "--dspark_head={dir}/dspark"]
WITH["confidence_threshold"] = ["--methods=early_exit", "--draft_length=confidence"]
WITH |= {name: ["--methods=dynamic_tree", f"--draft={programs.TINY}"] for name in ("tree_nodes", "tree_depth", "tree_beam")}
WITH |= {name: ["--methods=draft_tree", f"--draft={programs.TINY}"] for name in ("tree_shape", "tree_children")}
WITH["tree_acceptance"] = ["--methods=draft_tree", f"--draft={programs.TINY}", "--tree_shape=sequoia"]
WITH |= {f"lookahead_{name}": ["--methods=lookahead"] for name in ("window", "ngram", "guesses")}
WITH |= {"hierarchical_small": ["--methods=hierarchical", f"--draft={programs.TINY}"],
         "mixture": ["--methods=mixture"]}
WITH |= {"verify_costs": ["--methods=auto_lookup"],
         "draft_cost": ["--methods=early_exit", "--draft_length=renewal"]}
WITH |= {"online": ["--methods=online", "--medusa_head={dir}/medusa"],
         **{f"online_{name}": ["--methods=online", "--eagle3_head={dir}/eagle3"]
            for name in ("requests", "steps", "rate")}}
WITH |= {name: [f"--coordinator=127.0.0.1:{many_processes.free_port()}", "--num_processes=1", "--process_id=0"]
         for name in distributed.NAMES}
WITH |= {name: ["--mesh=data:1"] for name in ("draft_sharding", "must_divide")}
for name in ("coordinator", "num_processes", "process_id"):
  WITH[name] = [arg for arg in WITH[name] if not arg.startswith(f"--{name}=")]
WITH["run_code"] = ["--quality"]
SELECTS = {"pair": {"target", "draft"}, "preset": {"target", "methods"}}  # a flag that stands for others
NOT_SETTINGS = {"outdir", "overwrite", "resume", "costs", "trace", "quality", "run_code", *distributed.NAMES}

# What the message must name, beside "error:". Each is a benchmark on the tiny target unless it says otherwise.
BAD = {
    "unknown target": (["--target=nope"], ["'nope'", "smollm2-135m"]),
    "no target": (["--target="], ["smollm2-135m"]),
    "target without network": (["--target=org/model"], ["org/model", "network"]),
    "target that is no model": (["--target={dir}/two.jsonl"], ["two.jsonl", ".gguf"]),
    "target folder without a model": (["--target={dir}"], ["tokenizer.json"]),
    "target file that is not there": (["--target={dir}/none.gguf"], ["none.gguf"]),
    "truncated weights": (["--target={dir}/truncated"], ["model.safetensors", "download it again"]),
    "foreign weights": (["--target={dir}/foreign"], ["model.safetensors"]),
    "truncated GGUF": (["--target={dir}/foreign.gguf"], ["foreign.gguf"]),
    "missing tensor": (["--target={dir}/missing"], ["model.layers.1.mlp.up_proj.weight"]),
    "extra tensor": (["--target={dir}/extra"], ["model.layers.9.surplus"]),
    "unknown method": (["--methods=plain,magic"], ["'magic'", "plain, ngram"]),
    "method without its model": (["--methods=draft_model", "--target=nope"], ["draft_model", "--draft"]),
    "fallback on a method without its model": (["--methods=fallback", "--target=nope"], ["fallback", "--draft"]),
    "fallback on no method": (["--methods=fallback", "--fallback=plain,ngram", "--target=nope"],
                              ["--fallback=plain,ngram", "'plain'"]),
    "option that no method reads": (["--exit_layer=1", "--target=nope"], ["--exit_layer=1", "early_exit", "plain, ngram"]),
    "draft model that no method reads": (["--draft=x", "--target=nope"], ["--draft=x", "draft_model", "plain, ngram"]),
    "fallback on itself": (["--methods=fallback", "--fallback=fallback,ngram", "--target=nope"],
                           ["--fallback=fallback,ngram", "'fallback' cannot"]),
    "fallback on nothing": (["--methods=fallback", "--fallback=", "--target=nope"], ["--fallback=", "2 or more"]),
    "hierarchical on itself": (["--methods=hierarchical", "--hierarchical_small=hierarchical", "--target=nope"],
                               ["--hierarchical_small=hierarchical", "cannot"]),
    "drafts too wide for all methods": (["--methods=all", "--draft_tokens=64", "--target=nope"], ["--draft_tokens=64"]),
    "options of draws without draws": (["--methods=early_exit", "--draft_top_k=3", "--target=nope"],
                                       ["--draft_top_k=3", "--draft_sampled"]),
    "threshold of another rule": (["--confidence_threshold=0.5", "--target=nope"],
                                  ["--confidence_threshold=0.5", "--draft_length=confidence"]),
    "shape that is none": (["--methods=draft_tree", "--tree_shape=3,x", f"--draft={programs.TINY}"], ["--tree_shape=3,x"]),
    "layers that are none": (["--methods=layer_skip", "--skip_layers=a"], ["--skip_layers=a"]),
    "layer that the target has not": (["--methods=layer_skip", "--skip_layers=7"], ["layer_skip", "7"]),
    "exit above the target": (["--methods=early_exit", "--exit_layer=2"], ["early_exit", "exit_layer=2", "1 to 1"]),
    "datastore that is not there": (["--methods=retrieval", "--datastore={dir}/none.npz"], ["none.npz"]),
    "costs that are too few": (["--verify_costs=1,2", "--target=nope"], ["--verify_costs=1,2", "6 positive"]),
    "head that does not come along": (["--methods=eagle3"], ["method eagle3", "--eagle3_head"]),
    "head of another kind": (["--methods=medusa", "--medusa_head={dir}/dflash"], ["--medusa_head", "of the kind dflash"]),
    "head of another target": (["--methods=eagle3", "--eagle3_head={dir}/foreign_head"], ["foreign_head", "width"]),
    "head that is not there": (["--methods=dflash", "--dflash_head={dir}/none"], ["none"]),
    "tree and chain of a head": (["--methods=eagle3", "--eagle3_head={dir}/eagle3", "--tree_nodes=8", "--draft_tokens=3"],
                                 ["--tree_nodes=8", "--draft_tokens=3"]),
    "drawn tree of a head": (["--methods=eagle3", "--eagle3_head={dir}/eagle3", "--tree_nodes=8", "--draft_sampled"],
                             ["--tree_nodes=8", "--draft_sampled"]),
    "fixed and grown tree of a head": (["--methods=eagle", "--eagle_head={dir}/eagle", "--tree_shape=2,1",
                                        "--tree_beam=2"], ["--tree_shape=2,1", "--tree_beam=2"]),
    "head of another EAGLE": (["--methods=eagle", "--eagle_head={dir}/eagle3"], ["--eagle_head", "of the kind eagle3"]),
    "target beside a preset": (["--preset={dir}/advice.json"], ["--preset=", "--target"]),
    "preset that is no advice": (["--preset={dir}/two.jsonl"], ["--preset=", "two.jsonl"]),
    "preset that is not there": (["--preset={dir}/none.json"], ["--preset=", "none.json"]),
    "target beside a pair": (["--pair=qwen2.5-coder"], ["--pair=qwen2.5-coder", "--target"]),
    "no method": (["--methods="], ["--methods", "plain, ngram"]),
    "method given twice": (["--methods=plain,plain"], ["--methods", "once"]),
    "unknown category": (["--categories=cooking"], ["'cooking'", "chat"]),
    "no category": (["--categories="], ["categories"]),
    "unknown language": (["--languages=tlh"], ["'tlh'", "en"]),
    "no request left": (["--workload=bundled", "--categories=chat", "--languages=ja"], ["chat", "ja"]),
    "unknown flag": (["--draft_token=3"], ["draft_token"]),
    "stray argument": (["chat"], ["'chat'", "--name=value"]),
    "limit 0": (["--limit=0"], ["--limit=0"]),
    "limit that is no number": (["--limit=few"], ["--limit=few"]),
    "batch size 0": (["--batch_size=0"], ["--batch_size=0"]),
    "repeats 0": (["--repeats=0"], ["--repeats=0"]),
    "no new tokens": (["--max_new_tokens=0"], ["--max_new_tokens=0"]),
    "more new tokens than the context": (["--max_new_tokens=99999999999"], ["two.jsonl:1", "--max_new_tokens", "256"]),
    "temperature below 0": (["--temperature=-1"], ["temperature", "-1", "0 (greedy) or more"]),
    "temperature nan": (["--temperature=nan"], ["temperature", "nan"]),
    "temperature inf": (["--temperature=inf"], ["temperature", "inf"]),
    "temperature in words": (["--temperature=hot"], ["--temperature=hot"]),
    "top_k below 0": (["--top_k=-1"], ["top_k", "-1"]),
    "top_k with a fraction": (["--top_k=1.5"], ["--top_k=1.5"]),
    "top_p 0": (["--top_p=0"], ["top_p", "(0, 1]"]),
    "top_p above 1": (["--top_p=1.5"], ["top_p", "1.5"]),
    "min_p above 1": (["--min_p=2"], ["min_p", "[0, 1]"]),
    "seed below 0": (["--seed=-1"], ["--seed=-1"]),
    "draft tokens 0": (["--draft_tokens=0"], ["--draft_tokens=0"]),
    "n-gram lengths in the wrong order": (["--min_ngram=4"], ["min_ngram=4", "max_ngram=3"]),
    "unknown match": (["--ngram_match=best"], ["best", "latest"]),
    "drafts wider than a step": (["--draft_tokens=64"], ["draft_tokens", "64"]),
    "no workload": (["--workload="], ["bundled"]),
    "workload that is not there": (["--workload={dir}/none.jsonl"], ["none.jsonl", "bundled"]),
    "workload given twice": (["--workload={dir}/two.jsonl,{dir}/two.jsonl"], ["two.jsonl:1", "'a'"]),
    "line that is not JSON": (["--workload={dir}/two.jsonl,{dir}/not_json.jsonl"], ["not_json.jsonl:2"]),
    "line without a field": (["--workload={dir}/no_field.jsonl"], ["no_field.jsonl:2", "'lang'"]),
    "empty prompt": (["--workload={dir}/empty.jsonl"], ["empty.jsonl:2", "empty"]),
    "prompt over the context": (["--workload={dir}/long.jsonl"], ["long.jsonl:2", "256"]),
    "turns over the context": (["--workload={dir}/turns.jsonl"], ["turns.jsonl:2"]),
    "outdir that is a file": (["--outdir={dir}/two.jsonl"], ["--outdir", "two.jsonl"]),
    "outdir below a file": (["--outdir={dir}/two.jsonl/x"], ["--outdir", "two.jsonl is a file"]),
    "outdir that is used": (["--outdir={dir}/truncated"], ["--outdir", "--overwrite", "--resume"]),
    "outdir that is no run": (["--outdir={dir}/thesis", "--overwrite"], ["--overwrite", "thesis"]),
    "outdir that is a model": (["--outdir={dir}/truncated", "--overwrite"], ["--overwrite", "truncated"]),
    "resume of no run": (["--outdir={dir}/thesis", "--resume"], ["--resume", "config.json"]),
    "resume of nothing": (["--outdir={dir}/new", "--resume"], ["--resume", "new"]),
    "resume without an outdir": (["--outdir=", "--resume"], ["--outdir"]),
    "code that nothing judges": (["--run_code", "--target=nope"], ["--run_code", "--quality"]),
    "unknown verifier": (["--verifier=magic"], ["--verifier=magic", "point", "lossy_cascade"]),
    "verifier that needs sampled drafts": (["--verifier=kseq", "--target=nope"],
                                           ["--verifier=kseq", "ngram", "point,"]),
    "option of another verifier": (["--typical_alpha=0.5", "--target=nope"],
                                   ["--typical_alpha=0.5", "--verifier=lossy_typical", "--verifier=point"]),
    "option out of its range": (["--verifier=lossy_lenient", "--lenience=2"], ["--lenience=2", "(0, 1]"]),
    "id that is no number": (["--banned_ids=3,x", "--target=nope"], ["--banned_ids", "'x'"]),
    "id below 0": (["--allowed_ids=-3", "--target=nope"], ["--allowed_ids", "'-3'"]),
    "no id": (["--allowed_ids="], ["--allowed_ids", "empty"]),
    "bias without an id": (["--logit_bias=3:1,5"], ["--logit_bias", "'5'"]),
    "bias that is no number": (["--logit_bias=3:nan"], ["--logit_bias", "'3:nan'"]),
    "bias of no id": (["--logit_bias=a:1"], ["--logit_bias", "'a:1'"]),
    "two biases of an id": (["--logit_bias=3:1,03:2"], ["--logit_bias", "'03:2'", "3"]),
    "penalty out of its range": (["--presence_penalty=3"], ["presence_penalty", "3", "[-2, 2]"]),
    "id beyond the vocabulary": (["--banned_ids=99999"], ["banned_ids", "99999", "target's ids"]),
    "minimum beyond the budget": (["--min_new_tokens=17"], ["min_new_tokens=17", "max_new_tokens=16"]),
    "minimum below 0": (["--min_new_tokens=-1"], ["--min_new_tokens=-1"]),
    "everything banned": (["--allowed_ids=5", "--banned_ids=5"], ["allowed_ids", "banned"]),
    "resume and overwrite": (["--resume", "--overwrite"], ["--resume", "--overwrite"]),
}

# The verifiers' costs alone: what is timed is stood in for, and weights must not be asked for.
VERIFY = """
import specjax
from experiments.harness import verifier_speed
verifier_speed.timers = lambda: {name: (lambda: 0.25) for name in verifier_speed.bars()}
verifier_speed.memory = lambda name: 3 * verifier_speed.logits().nbytes
specjax.load = None
"""

SPEED = {
    "prototype that is no Python": (["--prototype={dir}/two.jsonl"], ["--prototype=", "two.jsonl", ".py"]),
    "outdir below a file": (["--outdir={dir}/two.jsonl/x"], ["--outdir", "two.jsonl is a file"]),
    "prototype beside one part": (["--prototype=tests/conftest.py", "--only=verify"], ["--prototype", "--only=verify"]),
}

GENERATE = {
    "all methods": (["--prompt=hi", "--method=all"], ["--method=all", "plain, ngram"]),
    "no prompt": ([], ["--prompt"]),
    "empty prompt": (["--prompt="], ["--prompt"]),
    "unknown method": (["--prompt=hi", "--method=magic"], ["'magic'", "plain, ngram"]),
    "unknown colour": (["--prompt=hi", "--color=pink"], ["--color=pink"]),
    "unknown target": (["--prompt=hi", "--target=nope"], ["'nope'"]),
    "temperature below 0": (["--prompt=hi", "--temperature=-1"], ["temperature"]),
    "seed beyond 31 bits": (["--prompt=hi", "--seed=2147483648"], ["seed=2147483648"]),
    "new tokens over the context": (["--prompt=hi", "--max_new_tokens=250"], ["max_new_tokens", "256"]),
    "prompt over the context": ([f"--prompt={'hi ' * 200}"], ["256"]),
    "system message without a template": (["--prompt=hi", "--system=Be brief.", "--raw"], ["--system", "--raw"]),
    "stray argument": (["--prompt=hi", "there"], ["'there'"]),
    "verifier that needs sampled drafts": (["--prompt=hi", "--verifier=lossy_cascade", "--target=nope"],
                                           ["--verifier=lossy_cascade", "ngram", "point,"]),
    "logprobs below 0": (["--prompt=hi", "--logprobs=-1"], ["--logprobs=-1"]),
    "logprobs beyond the vocabulary": (["--prompt=hi", "--logprobs=99999"], ["logprobs=99999", "vocabulary"]),
    "id beyond the vocabulary": (["--prompt=hi", "--logit_bias=99999:1"], ["logit_bias", "99999"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Broken things."""
  path = tmp_path_factory.mktemp("broken")
  line = lambda name="a", **changes: json.dumps(
      {"id": name, "category": "chat", "lang": "en", "prompt": "hello there"} | changes) + "\n"
  write = lambda name, *lines: (path / name).write_text("".join(lines))
  write("two.jsonl", line(), line("b"))
  write("not_json.jsonl", line("c"), "{oops\n")
  write("no_field.jsonl", line(), '{"id": "b", "category": "chat", "prompt": "hi"}\n')
  write("empty.jsonl", line(), line("b", prompt=" "))
  write("long.jsonl", line(), line("b", prompt="hello " * 60))
  turns = {"id": "b", "category": "chat", "lang": "en", "turns": ["x" * 60] * 5}
  write("turns.jsonl", line(), json.dumps(turns) + "\n")
  advised = {"category": "chat", "method": "suffix", "settings": {}}
  (path / "advice.json").write_text(json.dumps({"schema": 1, "target": "x/y", "overall": advised, "types": [advised]}))
  (path / "thesis").mkdir()
  (path / "thesis" / "thesis.tex").write_text("years of work")
  tokenizer = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  text = retrieval.join([[5, 6, 7, 5], [6, 7, 5]])
  retrieval.save(path / "store.npz", text, retrieval.suffix_array(text), tokenizer)
  target, _ = specjax.load(programs.ROOT / programs.TINY)
  ids = tuple(range(20))
  for name, head in (("eagle", tiny.eagle(target, ids)), ("eagle3", tiny.eagle3(target, ids)),
                     ("medusa", tiny.medusa(target, ids)), ("hydra", tiny.hydra(target, ids)),
                     ("dflash", tiny.dflash(target, ids)), ("dspark", tiny.dspark(target, ids)),
                     ("mtp", tiny.mtp(target, ids)),
                     ("peagle", tiny.peagle(target, ids)),
                     ("foreign_head", tiny.eagle3(tiny.decoder(), ids))):
    heads.save_head(head, path / name)
  for name in ("truncated", "foreign", "missing", "extra", "pard"):
    shutil.copytree(programs.ROOT / programs.TINY, path / name)
  config = json.loads((path / "pard" / "config.json").read_text())
  (path / "pard" / "config.json").write_text(json.dumps(config | {"pard_token": 3, "spd_type": "pard"}))
  weights = (path / "truncated" / "model.safetensors").read_bytes()
  (path / "truncated" / "model.safetensors").write_bytes(weights[:len(weights) // 2])
  (path / "foreign" / "model.safetensors").write_bytes(b"GIF89a" * 999)
  (path / "foreign.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
  tensors = safetensors_numpy.load_file(path / "missing" / "model.safetensors")
  safetensors_numpy.save_file(tensors | {"model.layers.9.surplus": np.zeros(3, np.float32)},
                              path / "extra" / "model.safetensors")
  del tensors["model.layers.1.mlp.up_proj.weight"]
  safetensors_numpy.save_file(tensors, path / "missing" / "model.safetensors")
  return path


def _contents(path):
  return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def ended(tmp_path_factory, folder):
  """By (kind, name), how a program ended: one process runs all cases of this file. Also what stood on the disk."""
  def tiny(program, args, name):
    outdir = [f"--outdir={folder}/out/{name}", f"--workload={folder}/two.jsonl", "--nocosts"]
    budget = [] if program == "speed" else ["--max_new_tokens=16"]
    given = [f"--target={programs.TINY}", *budget, *(outdir if program == "benchmark" else [])]
    return program, given + [arg.replace("{dir}", str(folder)) for arg in args], ""

  cases = {("bad", name): tiny("benchmark", args, name) for name, (args, _) in BAD.items()}
  cases |= {("generate", name): tiny("generate", args, name) for name, (args, _) in GENERATE.items()}
  cases |= {("speed", name): tiny("speed", args, name) for name, (args, _) in SPEED.items()}
  capture = lambda *args: ("benchmark", [arg.replace("{dir}", str(folder)) for arg in args], CAPTURE)
  cases["flag", None] = capture("--outdir=o")
  cases |= {("flag", name): capture("--outdir=o", f"--{name}={value}", *WITH.get(name, []))
            for name, (value, _) in FLAGS.items()}
  cases |= {("seed", seed): capture(f"--seed={seed}") for seed in (2**31 - 1, 2**32, 10**12)}
  cases["default outdir", None] = capture()
  cases["many files", None] = capture("--workload=bundled,{dir}/two.jsonl", "--categories=chat", "--limit=100")
  cases["help", "benchmark"] = ("benchmark", ["--help"], "")
  cases["verify", None] = ("speed", ["--only=verify", f"--outdir={folder}/out/verify"], VERIFY)
  cases |= {("help", name): (name, ["--help"], "") for name in ("generate", "speed", "report")}
  cases["help", "generate"] = ("generate", ["--helpshort"], "")
  before = _contents(folder)
  found = dict(zip(cases, programs.run_all(cases.values(), env=programs.environment(tmp_path_factory)), strict=True))
  return found | {"before": before, "after": _contents(folder)}


def _is_one_message(program, parts):
  assert program.code == 2, program.err
  assert "Traceback" not in program.err
  assert program.err.replace("\r", "\n").count("error:") == 1
  assert program.message.startswith("error: ")
  assert not program.out
  for part in parts:
    assert part in program.message


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_the_benchmark(ended, name):
  _is_one_message(ended["bad", name], BAD[name][1])


@pytest.mark.parametrize("name", BAD)
def test_bad_input_leaves_nothing_half_run(ended, name):
  """Neither a folder that the corrected command would be refused for, nor a change of anything that was there."""
  made = {path for path in set(ended["after"]) - set(ended["before"])
          if path.startswith(f"out/{name}/") or path.startswith("new/") and name == "resume of nothing"}
  assert not made


def test_bad_input_changes_nothing(ended):
  changed = {path for path in ended["before"] if ended["after"].get(path) != ended["before"][path]}
  assert not changed


@pytest.mark.parametrize("name", GENERATE)
def test_bad_input_of_generate(ended, name):
  _is_one_message(ended["generate", name], GENERATE[name][1])


@pytest.mark.parametrize("name", SPEED)
def test_bad_input_of_the_speed_benchmark(ended, name):
  _is_one_message(ended["speed", name], SPEED[name][1])


def test_verification_is_timed_without_a_target(ended, folder):
  end = ended["verify", None]
  assert end.code == 0, end.err
  lines = [line.split() for line in end.out.splitlines()]
  assert ["verify,", "block", "0.25", "ms"] in [line[:4] for line in lines]
  assert ["memory", "of", "verify,", "block", "3.00", "arrays"] in [line[:6] for line in lines]
  kept = json.loads((folder / "out" / "verify" / "speed.json").read_text())
  assert len(kept["figures"]) == len(lines) and set(kept["samples"]["verify, block"]) == {0.25}


def test_every_flag_is_tried(ended):
  assert set(json.loads(ended["flag", None].out)["flags"]) == set(FLAGS)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_reaches_the_run_and_its_record(ended, folder, name):
  value, holds = FLAGS[name]
  default, got = (json.loads(ended["flag", key].out) for key in (None, name))
  if holds:
    assert holds(got) and not holds(default)
  if name in NOT_SETTINGS:
    assert name not in got["config"]
  else:
    assert got["config"][name] != default["config"][name]
    listed = isinstance(got["config"][name], list)
    shown = ",".join(got["config"][name]) if listed else str(got["config"][name]).lower()
    assert shown == value.replace("{dir}", str(folder)).lower()
    # Nothing else moves with it, apart from what it selects.
    others = {k for k in default["config"] if got["config"][k] != default["config"][k]}
    others -= {arg[2:].partition("=")[0] for arg in WITH.get(name, [])}
    assert others - SELECTS.get(name, set()) <= {name, "command", "date", "request_ids", "requests_sha256"}
  assert f"--{name}={value}".replace("{dir}", str(folder)) in got["config"]["command"]


def test_the_record_names_the_requests(ended):
  got = json.loads(ended["flag", None].out)
  assert got["config"]["request_ids"] == [r[0] for r in got["requests"]]
  assert len({r[1] for r in got["requests"]}) == 13


def test_several_workloads(ended):
  got = json.loads(ended["many files", None].out)
  assert {pathlib.Path(r[3].rpartition(":")[0]).name for r in got["requests"]} == {"bundled.jsonl", "two.jsonl"}


def test_the_default_outdir_is_dated(ended):
  assert json.loads(ended["default outdir", None].out)["outdir"].startswith("runs/20")


@pytest.mark.parametrize("seed", [2**31 - 1, 2**32, 10**12])
def test_a_seed_is_refused_or_means_itself(ended, seed):
  """JAX keeps 32 bits of it: 2**32 must not silently be 0."""
  program = ended["seed", seed]
  if program.code == 2:
    assert "seed" in program.message
    return
  key = json.loads(program.out)["key"]
  assert key[0] * 2**32 + key[1] == seed


@pytest.mark.parametrize("program, flag", [("benchmark", "--outdir"), ("generate", "--prompt"), ("speed", "--only"),
                                           ("report", "RUN_DIR")])
def test_help_names_the_program_and_its_flags(ended, program, flag):
  end = ended["help", program]
  assert end.code == 0 and not end.err
  assert f"python -m experiments.{program}" in end.out
  assert flag in end.out


@pytest.fixture
def jax_cache():
  """JAX's settings of its cache of programs, which a test may change."""
  names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
           "jax_persistent_cache_min_entry_size_bytes")
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update(names[0], None)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.mark.usefixtures("jax_cache")
def test_where_programs_are_kept(monkeypatch):
  monkeypatch.setenv("SPECJAX_CACHE", "/some/where")
  assert cli.programs_folder().is_relative_to("/some/where")
  for unset in (lambda: monkeypatch.delenv("SPECJAX_CACHE"), lambda: monkeypatch.setenv("SPECJAX_CACHE", "")):
    unset()
    assert cli.programs_folder().is_relative_to(pathlib.Path.home() / ".cache" / "specjax")


@pytest.mark.usefixtures("jax_cache")
def test_compiled_programs_are_kept(monkeypatch, tmp_path):
  monkeypatch.setenv("SPECJAX_CACHE", os.fspath(tmp_path))
  cli.keep_compiled_programs()
  assert pathlib.Path(jax.config.jax_compilation_cache_dir).is_relative_to(tmp_path)
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
  cli.keep_compiled_programs()
  assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
  assert cli.programs_folder() == tmp_path / "mine"


def test_fail(capsys):
  with pytest.raises(SystemExit) as ended:
    cli.fail(ValueError("  what and why\n"))
  assert ended.value.code == 2
  assert capsys.readouterr() == ("", "error: what and why\n")
