"""Seeds small mistakes in copies of the package and shows which of them the tests find.

    python scripts/mutations.py                     all of them: one row of docs/mutations.md each, as it is found
    python scripts/mutations.py alpha gate          those whose name has one of these words

A mutation is a text that occurs once in the sources, in whatever file, and what replaces it. The tests of its folders
run until the first failure, at first those whose names fit. A text that does not occur once is "not applicable": the
code has changed, and the mutation must be written anew. Shape checks stay off, as in the default tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (".py", ".cpp", ".h")
ADDOPTS = "--strict-markers --timeout=300 -m 'not slow and not gpu and not compiled' --benchmark-disable"


class Mutation(NamedTuple):
    """A mistake: its name "package: what", the text, what takes its place, folders of tests, and words of their names."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    first: str = ""


def _m(name: str, old: str, new: str, tests: str, first: str = "") -> Mutation:
    return Mutation(name, old, new, tuple(tests.split()), first)


# fmt: off
LEYLINE = [
    _m("leyline: the counter of random numbers mixes episode and step",
       "(episode * 4096 + t)", "(episode + t)", "tests/leyline", "random"),
    _m("leyline: a permutation is not that of its step",
       "length, episode=episode, t=t).argsort(", "length, episode=episode).argsort(",
       "tests/leyline tests/tolaria", "random or batches"),
    _m("leyline: a held seed takes no part in coalitions",
       "BLENDED = frozenset({_S.BLENDING, _S.HOLDING, _S.FOSSILIZED})", "BLENDED = frozenset({_S.BLENDING, _S.FOSSILIZED})",
       "tests/leyline tests/tolaria", "stages or coalition"),
    _m("leyline: packed tensors overlap by one word",
       "-(-size * dtype.itemsize // _WORD)", "size * dtype.itemsize // _WORD", "tests/leyline", "structure"),
    _m("leyline: rows of a host begin one host late",
       "value.unflatten(0, (num_envs, per_host))[chosen]", "value.unflatten(0, (num_envs, per_host)).roll(-1, 0)[chosen]",
       "tests/leyline tests/tolaria", "tree"),
]
RULES = [
    _m("kasmina: PRUNE of an inactive seed is scheduled instead of immediate",
       "((chosen.ticks == 0) | (slots.alpha == 0.0))", "(chosen.ticks == 0)", "tests/kasmina/rules"),
    _m("kasmina: a contribution of exactly 1 does not count",
       "fossilized & (slots.contribution >= 1.0)", "fossilized & (slots.contribution > 1.0)",
       "tests/kasmina/rules"),
    _m("kasmina: clocks advance in the step of a transition too",
       "slots.epochs_in_stage + (occupied & ~moved_before)", "slots.epochs_in_stage + occupied", "tests/kasmina/rules"),
    _m("kasmina: the strict gate waits one step longer for blending",
       "epochs < c.min_blending_epochs", "epochs <= c.min_blending_epochs", "tests/kasmina/rules"),
    _m("kasmina: one seed more than the limit may grow",
       "HAS_MODULE).sum(dim=1) < max_seeds", "HAS_MODULE).sum(dim=1) <= max_seeds", "tests/kasmina/rules"),
    _m("kasmina: ramps take the wrong direction",
       "int(AlphaMode.UP) + (target < slots.alpha)", "int(AlphaMode.UP) + (target > slots.alpha)",
       "tests/kasmina/rules"),
    _m("kasmina: a rollback begins no new segment",
       'changes["segment"] = hosts.segment + panic', 'changes["segment"] = hosts.segment', "tests/kasmina/rules"),
    _m("kasmina: the velocity of a contribution has the wrong sign",
       "0.3 * (new_NS - slots.contribution)", "0.3 * (slots.contribution - new_NS)", "tests/kasmina/rules"),
    _m("kasmina: a style with a gate is legal on a seed without one",
       "(has_gate[hosts_N, target_N] | ~wants_gate)", "(has_gate[hosts_N, target_N] | wants_gate | ~wants_gate)",
       "tests/kasmina/rules"),
]
PARAMETERS = [
    _m("kasmina: weight decay has the wrong sign",
       "grad.addcmul_(params, decay_mask * spec.sgd_weight_decay)",
       "grad.addcmul_(params, decay_mask * -spec.sgd_weight_decay)", "tests/kasmina/parameters", "optim"),
    _m("kasmina: Adam corrects the second moment by the first's factor",
       "1.0 - beta1**steps_R1, 1.0 - beta2**steps_R1", "1.0 - beta1**steps_R1, 1.0 - beta1**steps_R1",
       "tests/kasmina/parameters", "optim"),
    _m("kasmina: small gradients are scaled up to the limit",
       "(max_norm / (norm + _CLIP_EPS)).clamp_(max=1.0)", "(max_norm / (norm + _CLIP_EPS))",
       "tests/kasmina/parameters", "optim"),
    _m("kasmina: a rate falls over no steps for a seed of the last one",
       "min(max(spec.warmup, born), episode_length - 1)", "max(spec.warmup, born)", "tests/kasmina/parameters", "optim"),
    _m("kasmina: any number is an algorithm of a slot",
       "\"algorithm\": set(Algorithm),", "", "tests/kasmina/rules", "slot_fields"),
    _m("kasmina: all dropout masks of a pass are equal",
       "self.count += 1\n        return self._keys", "return self._keys", "tests/kasmina/parameters", "dropout"),
    _m("kasmina: dropped values are not made up for",
       "return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0", "return 1.0", "tests/kasmina/parameters", "dropout"),
]
NETWORKS = [
    _m("kasmina: the slot of a segment lies one segment early",
       "(point.order + 1) * length - 1: point.slot_id", "max(point.order, 1) * length - 1: point.slot_id",
       "tests/kasmina", "transformer"),
    _m("kasmina: max pooling gives ties to the last of the window",
       "(values[1] > values[0]).to(grad.dtype)", "(values[1] >= values[0]).to(grad.dtype)", "tests/kasmina", "pooling"),
    _m("kasmina: a convolution over tokens sees the next one",
       "padding = kernel - 1 if padding is None", "padding = kernel // 2 if padding is None", "tests/kasmina", "blueprint"),
    _m("kasmina: lora has twice its rank",
       "return _low_rank(d, 8)", "return _low_rank(d, 16)", "tests/kasmina", "blueprint"),
    _m("kasmina: an isolated seed sends gradients into its host",
       "return (h.detach() if isolated else h).contiguous()", "return h.contiguous()",
       "tests/kasmina tests/tolaria/executors", "blending"),
    _m("kasmina: MULTIPLY passes no gradient through its weight",
       "grad_h = grad + factor_grad(grad, signal, alpha, grad)", "grad_h = grad", "tests/kasmina", "blending"),
]
TAMIYO = [
    _m("tamiyo: the time to the target is negative",
       "slots.alpha_total - slots.alpha_done,", "slots.alpha_done - slots.alpha_total,", "tests/tamiyo", "feature"),
    _m("tamiyo: the velocity of alpha is measured from alpha itself",
       "(slots.alpha_target - slots.alpha_start) / slots.alpha_total",
       "(slots.alpha_target - slots.alpha) / slots.alpha_total", "tests/tamiyo", "feature"),
    _m("tamiyo: GATED_GATE counts as available without a gate",
       "(legal[:, LifecycleOp.SET_ALPHA_TARGET] & has_gate).any(dim=-1)",
       "legal[:, LifecycleOp.SET_ALPHA_TARGET].any(dim=-1)", "tests/tamiyo", "masks or heads"),
    _m("tamiyo: a uniform of 0 draws a masked value",
       "(up_to <= u * up_to[-1])", "(up_to < u * up_to[-1])", "tests/tamiyo", "heads"),
    _m("tamiyo: an action outside its mask has a log-probability",
       "log_prob = log_prob.masked_fill(decision.mask.gather(0, index) == 0.0, torch.nan)", "log_prob = log_prob + 0.0",
       "tests/tamiyo", "heads"),
    _m("tamiyo: the gradient passes through a reset of the recurrent state",
       "tanh_c_all * o * (1.0 - o), f * keep", "tanh_c_all * o * (1.0 - o), f", "tests/tamiyo", "recurrence"),
    _m("tamiyo: the heuristic judges a seed as soon as it is measured",
       "measured_NS & (slots.age >= rules.patience *", "measured_NS & (slots.age >= 0.0 *",
       "tests/tamiyo", "heuristic"),
]
AGENT = [
    _m("simic: the surrogate is not clipped",
       "surrogate = torch.minimum(", "surrogate = torch.maximum(", "tests/simic", "loss"),
    _m("simic: rolled back steps train the critic",
       "torch.where(x.forced, forced_weight, 1.0) * x.valid", "torch.where(x.forced, forced_weight, 1.0)",
       "tests/simic", "loss"),
    _m("simic: a terminal step bootstraps",
       "delta_NT.masked_fill_(terminal, 0.0)", "delta_NT.masked_fill_(terminal, 1.0)", "tests/simic", "advantage or gae"),
    _m("simic: the mean of the copies counts the host itself",
       "- counted_kDT) / (group_size - 1)", "- counted_kDT) / group_size", "tests/simic", "advantage or paired"),
    _m("simic: the running variance forgets the distance of the means",
       "+ m * (1 - m) * delta.square()", "", "tests/simic", "normalizer"),
    _m("simic: the final reward is discounted once too often",
       "self.gamma ** (last - place_N)", "self.gamma ** (last - place_N + 1)", "tests/simic", "buffer or final"),
    _m("simic: the stop by KL divergence has no effect",
       "stopped = stopped | exceeded", "stopped = stopped | (exceeded & stopped)", "tests/simic", "ppo"),
    _m("simic: Adam does not correct its step size",
       "(lr / (1.0 - beta1**step)).to(", "(lr / (1.0 - beta1 * 0.0 * step)).to(", "tests/simic", "adam"),
]
REWARDS = [
    _m("simic: parameters raise the sparse reward",
       'x.known("committed_accs") / 100 - price', 'x.known("committed_accs") / 100 + price', "tests/simic/rewards"),
    _m("simic: fossils take no place",
       'x.known("num_active") + num_fossilized - w["free_slots"]', 'x.known("num_active") - w["free_slots"]',
       "tests/simic/rewards"),
    _m("simic: hindsight credit is paid again",
       "keep_NS = live_NS & ~(x.is_target & fossilized_N[:, None])", "keep_NS = live_NS", "tests/simic/rewards"),
    _m("simic: the last step keeps the shaping",
       "shaping, terminal = -state.last, self.worth(", "shaping, terminal = 0.0 * state.last, self.worth(",
       "tests/simic/rewards"),
    _m("simic: after a rollback the potential is not discounted",
       "carried = state.before / GAMMA", "carried = state.before", "tests/simic/rewards"),
]
TOLARIA = [
    _m("tolaria: strikes are never cleared",
       "(state.strikes + struck_N).masked_fill(healthy_N, 0)", "(state.strikes + struck_N)", "tests/tolaria", "governor"),
    _m("tolaria: a host with strikes is snapshotted whole",
       "snapshot_N = safe & (state.strikes == 0) & ", "snapshot_N = safe & ", "tests/tolaria", "governor"),
    _m("tolaria: interactions subtract the background",
       "- f.single[:, None, :] + f.all_off[:, :, None]", "- f.single[:, None, :] - f.all_off[:, :, None]",
       "tests/tolaria", "coalitions"),
    _m("tolaria: each step of training begins with the same examples",
       "skipped = first - (passes[0] - 1) * size", "skipped = 0", "tests/tolaria", "batches"),
    _m("tolaria: the reward of healthy hosts is reset instead",
       "client.reset_hosts(carried, ~healthy)", "client.reset_hosts(carried, healthy)", "tests/tolaria", "rollback"),
    _m("tolaria: a gate's gradient is left out of the norm of its seed",
       "seed_square.index_add_(0, self._gate_of, gate_square).sqrt()", "seed_square.sqrt()",
       "tests/tolaria/executors", "streamed or training or plain"),
    _m("tolaria: the fused executor blends twice as much",
       "total.index_add_(1, part.hosts, signal * weight)", "total.index_add_(1, part.hosts, 2 * signal * weight)",
       "tests/tolaria/executors", "fused"),
    _m("tolaria: the fused executor passes no gradient through MULTIPLY",
       "grad_h.index_add_(1, part.hosts, of_host)", "grad_h.index_add_(1, part.hosts, 0 * of_host)",
       "tests/tolaria/executors", "fused"),
    _m("tolaria: infinite gradients do not count as exploding",
       "> _EXPLODING_CLIPS * grad_clip) | ~torch.isfinite(norms))", "> _EXPLODING_CLIPS * grad_clip))",
       "tests/tolaria", "gradient"),
    _m("tolaria: the native executor derives each function at its output",
       "y if from_output else x", "y", "tests/tolaria/executors", "native"),
]
TASKS = [
    _m("tasks: what is left of a split goes to the smallest fractions",
       "key=lambda i: (-fractions[i], i)", "key=lambda i: (fractions[i], i)", "tests/tasks", "split"),
    _m("tasks: the last token of a text has no target",
       "np.append(text[1:], storage.type(end))", "np.append(text[1:], storage.type(PADDING))", "tests/tasks", "text"),
    _m("tasks: pairs of scripted seeds count twice",
       "0.5 * spec.interaction * (sum_NK.square()", "spec.interaction * (sum_NK.square()", "tests/tasks", "null"),
    _m("tasks: padding counts as an example",
       "self.score(outputs, targets), (targets != PADDING).float())",
       "self.score(outputs, targets), (targets == targets).float())", "tests/tasks", "objective"),
    _m("tasks: a noisy label may be the right one",
       "shift = 1 + (other * (classes_N1 - 1)).long()", "shift = (other * (classes_N1 - 1)).long()",
       "tests/tasks", "instance"),
]
TELEMETRY = [
    _m("telemetry: Shapley values weigh coalitions by the wrong size",
       "share[a.bit_count()] *", "share[max(a.bit_count() - 1, 0)] *", "tests/telemetry/record", "shapley"),
    _m("telemetry: a record that follows a run finds no new anomalies",
       "            run.read_on()\n        self._searched = False", "            run.read_on()", "tests/telemetry/record", "follows"),
    _m("telemetry: a record follows a file that was cut",
       "return sum_before(file, self._read) == self._sum", "return True", "tests/telemetry/record", "follow"),
    _m("telemetry: a record that follows a run reads any file",
       "self._lock(follows)", "pass", "tests/telemetry/record", "follow"),
    _m("telemetry: a missing metric raises an alarm",
       "return value < self.threshold if self.below else value > self.threshold",
       "return not (value >= self.threshold if self.below else value <= self.threshold)", "tests/telemetry", "anomal"),
    _m("telemetry: a trend compares rounds that overlap",
       "recent[-2 * WINDOW : -WINDOW]", "recent[-2 * WINDOW : -WINDOW + 1]", "tests/telemetry", "anomal or trend"),
    _m("telemetry: env-steps per second forget the update",
       '+ (line.get("update_seconds") or 0.0)', "", "tests/telemetry tests/cli", "record or lines or speed"),
    _m("telemetry: any host name may ask",
       'allowed_hosts=["*"] if token else list(names)', 'allowed_hosts=["*"]',
       "tests/telemetry", "serve or guard"),
    _m("telemetry: a failing listener stops the run",
       'self.give_up(f"failed: {in_words(error)}")', "raise", "tests/telemetry", "hub or sinks"),
]
RUNS = [
    _m("runs: what is free must be better at once",
       "_EARLY = 0.02", "_EARLY = 0.0", "tests/runs", "growth"),
    _m("runs: architectures of a race grow from what is free",
       "grown = self._neighbours(replace(self.entries[parent]", "grown = self._neighbours(replace(self.entries[row]",
       "tests/runs", "growth"),
    _m("runs: ties count as improvements",
       "0.5 * (1.0 + np.sign(values - reference))", "0.5 * (1.0 + np.sign(values - reference + 1e-12))", "tests/runs", "statistics"),
    _m("runs: the interquartile mean keeps the extremes",
       "trim_mean(values, 0.25, axis=axis)", "trim_mean(values, 0.2, axis=axis)", "tests/runs", "statistics or rows or comparison"),
    _m("runs: the verdict turns the probability around",
       "100 * row.improvement.mean", "100 - 100 * row.improvement.mean", "tests/runs", "rows or comparison"),
    _m("runs: a damaged checkpoint is loaded",
       'if _digest(text, state) != digest:', 'if digest is None:', "tests/runs", "checkpoint"),
    _m("runs: a stopped run forgets the cost of its round",
       "            begun=begun,\n", "            begun=Cost(),\n", "tests/runs tests/test_cli.py", "runner"),
    _m("runs: a growth is continued with more steps than it has measured",
       "all(len(self.entries[row].val) == self.t - self.entries[row].late for row in trained)", "True", "tests/runs", "growth"),
    _m("runs: backward passes cost nothing",
       "(1 + BACKWARD) * self.train * per_example", "1 * self.train * per_example", "tests/runs", "cost"),
    _m("runs: the worst host is the best one",
       "n = int(np.argmax(objective))\n    if not objective[n]", "n = int(np.argmin(objective))\n    if not objective[n]", "tests/runs", "best_host"),
    _m("runs: unknown tables of a configuration replace known ones",
       "merged[key] = merge(merged[key], value) if both else value", "merged[key] = value",
       "tests/runs", "preset or config"),
]
OUTSIDE = [
    _m("export: the seeds of the first host are saved with any other",
       "at = row * engine.spec.num_slots + s", "at = s", "tests/export"),
    _m("export: a NaN in one of two outputs is not a difference",
       "off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())",
       "off = torch.where((a == b) | a.isnan() | b.isnan(), 0.0, (a - b).abs())", "tests/export", "difference"),
    _m("api: the timeline shows the cooldown",
       "(COOLDOWN - {SeedStage.PRUNED}) | {SeedStage.DORMANT}", "{SeedStage.DORMANT}", "tests/api", "grow or timeline"),
    _m("api: the largest of equally good networks is kept",
       "np.lexsort((stats.fossil_params, -stats.committed_acc,",
       "np.lexsort((-stats.fossil_params, stats.committed_acc,", "tests/api", "grow"),
    _m("api: True is taken for a number",
       "isinstance(value, int | origin) and not isinstance(value, bool)", "isinstance(value, int | origin)",
       "tests/api", "argument"),
    _m("cli: an option with = takes the next argument too",
       "0.0 if kind is bool or given", "0.0 if kind is bool",
       "tests/cli tests/test_cli.py tests/test_pasted_commands.py", "names_may"),
]
# fmt: on
MUTATIONS = (
    *LEYLINE,
    *RULES,
    *PARAMETERS,
    *NETWORKS,
    *TAMIYO,
    *AGENT,
    *REWARDS,
    *TOLARIA,
    *TASKS,
    *TELEMETRY,
    *RUNS,
    *OUTSIDE,
)  # fmt: skip


def place_of(text: str, package: Path) -> Path | None:
    """The file that has this text once; None where it occurs in none, or more than once."""
    found = [(path, count) for path in sorted(package.rglob("*"))
             if path.suffix in SOURCES and (count := path.read_text(encoding="utf-8").count(text))]  # fmt: skip
    return found[0][0] if len(found) == 1 and found[0][1] == 1 else None


def first_failure(tests: tuple[str, ...], words: str, source: Path) -> str:
    """The first failing test, "" if all pass, "hangs" after half an hour."""
    folders = [path for path in tests if (ROOT / path).exists()]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-o", f"addopts={ADDOPTS}",
               "-p", "no:cacheprovider", *folders, *(("-k", words) if words else ())]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1800
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].split(" - ")[0].split(maxsplit=1)[1]
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: no test has such a name
    return ""


def result_of(mutation: Mutation) -> str:
    """The test that found it, or "survived" or "not applicable"."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = place_of(mutation.old, source / "esper")
        if path is None:
            return "**not applicable**"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        failed = first_failure(mutation.tests, mutation.first, source) if mutation.first else ""
        failed = failed or first_failure(mutation.tests, "", source)
    return f"`{failed}`" if failed else "**survived**"


def main() -> None:
    """Print the table."""
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    print("| package | mistake | found by |\n|---|---|---|", flush=True)
    for mutation in chosen:
        began, result = time.monotonic(), result_of(mutation)
        print(f"| {mutation.name.replace(': ', ' | ', 1)} | {result} |", flush=True)
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
