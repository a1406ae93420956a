"""Measure fmeg's train step side by side with peers that compute the same model, in one run. See --help.

Every peer is a process of its own (scripts/bench_peers.py), so that threads, memory and compile caches do not mix. The
processes take turns: in each round every peer runs its steps while the others block on a pipe. What is compared is the
ratio of two peers in the same round, so that a machine that slows down for a while slows down both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
FLOPS_FORMULA = "6 * matmul parameters + 6 * layers * sequence * heads * head_dim (12, halved by the causal mask)"
MEMORY_MEANING = (
    "largest resident memory during a step (VmHWM) above that between steps (VmRSS: parameters, optimizer, libraries)"
)

DTYPES = ("fp32", "bf16")
TORCH_PEERS = ("module", "module-compiled", "huggingface")
"""The chart's 1.0 is the fastest of these."""
PEERS = {
    "fmeg": "make_train_step(compile=True, donate=True), AdamW and clipping in the graph",
    "module": "a Llama-like nn.Module, eager, clip_grad_norm_(foreach), AdamW(fused)",
    "module-compiled": "the same with its loss under torch.compile",
    "huggingface": "transformers' LlamaForCausalLM with sdpa, its loss under torch.compile, the same optimizer",
    "jax": "the same model and AdamW in jax, one jitted and donated step",
    "megatron": "megatron-core",
}
NEEDS = {"huggingface": "transformers", "jax": "jax", "megatron": "megatron.core"}
"""What a peer imports besides torch; a peer without it is skipped."""


@dataclass(frozen=True)
class Size:
    """A Llama-like GPT (rope, RMSNorm, SwiGLU, untied, no biases, no dropout) and its batch."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    sequence: int
    batch: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.sequence

    @property
    def matmul_parameters(self) -> int:
        """Those that every token is multiplied by: all but the embedding and the norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        return self.matmul_parameters + self.vocab * self.hidden + (2 * self.layers + 1) * self.hidden

    @property
    def flops_per_token(self) -> int:
        """FLOPS_FORMULA: forward and backward; what a kernel computes twice or masks away does not count."""
        return 6 * self.matmul_parameters + 6 * self.layers * self.sequence * self.heads * self.head_dim

    @property
    def matmul_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(M, K, N) of the model's largest products: the logits, their gradient's product, the MLP's first."""
        M, D, V = self.tokens, self.hidden, self.vocab
        return (M, D, V), (M, V, D), (M, D, self.ffn)


SIZES = {
    "small": Size(layers=4, hidden=256, ffn=688, heads=8, kv_heads=4, vocab=8192, sequence=256, batch=8),
    "big": Size(layers=8, hidden=512, ffn=1408, heads=8, kv_heads=4, vocab=16384, sequence=512, batch=4),
    "tiny": Size(layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, vocab=64, sequence=16, batch=2),
}
"""`tiny` is for tests of this script: its times mean nothing."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure and where to write."""

    sizes: tuple[str, ...] = ("small",)
    """small, big, or tiny, which is for tests."""
    dtypes: tuple[str, ...] = ("fp32",)
    """fp32, or bf16: parameters in fp32, compute in bf16."""
    threads: tuple[int, ...] = (1,)
    """Threads of each peer, which is bound to as many cores."""
    peers: tuple[str, ...] = tuple(PEERS)
    """Whom to measure; one that is not installed is skipped."""
    rounds: int = 7
    """How often each peer has its turn."""
    steps: int = 2
    """Steps in each turn."""
    seconds_per_peer: float = 60.0
    """A peer whose turns would take longer together does fewer steps and rounds, at least one. Warm-up is not counted."""
    compile: bool = True
    """False: fmeg and huggingface run eagerly, and module-compiled is skipped."""
    import_repeats: int = 5
    """Fresh processes for each import time; 0 measures none."""
    tensor_parallel: bool = False
    """Also measure fmeg on 2 tensor-parallel processes of 1 thread against 1 process of 2 threads."""
    out: Path | None = None
    """Directory for results.json, table.md and chart.png."""


@dataclass(frozen=True)
class Case:
    """What one peer's process is to build."""

    peer: str
    size: str
    dtype: str
    threads: int
    compile: bool = True
    rank: int = 0
    ranks: int = 1
    rendezvous: str | None = None
    """A file that tensor-parallel ranks meet at."""


class PeerError(Exception):
    """A peer's process has failed; the reason in one line."""


class Peer:
    """A peer's processes: one, or one for each tensor-parallel rank. They run while they are asked, and block otherwise."""

    def __init__(self, name: str, cases: Sequence[Case], scratch: Path) -> None:
        self.name = name
        cores = sorted(os.sched_getaffinity(0))
        self._processes = []
        for case in cases:
            caches = scratch / f"{name}-{case.rank}"
            caches.mkdir()
            first = case.rank * case.threads
            with _bound_to(cores[first : first + case.threads]):
                process = subprocess.Popen(
                    [sys.executable, str(SCRIPTS / "bench_peers.py"), json.dumps(dataclasses.asdict(case))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches)},  # empty: compilation is measured cold
                )
            self._processes.append(process)

    def ask(self, request: str) -> list[dict[str, Any]]:
        """Send a request to every process, and wait for all answers."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the missing answer says it
                process.stdin.write(request + "\n")
                process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            answer = json.loads(line) if line else {"error": f"its process ended with status {process.wait()}"}
            if "error" in answer:
                raise PeerError(answer["error"])
            answers.append(answer)
        return answers

    def run(self, request: str) -> dict[str, Any]:
        """As `ask`, with the ranks' answers made one: the slowest one's time, the sum of CPU seconds and memory."""
        answers = self.ask(request)
        joined = dict(answers[0])
        joined["wall"] = max(a["wall"] for a in answers)
        joined["cpu"] = sum(a["cpu"] for a in answers)
        if "memory" in joined:
            known = [a["memory"] for a in answers if a["memory"] is not None]
            joined["memory"] = {k: sum(m[k] for m in known) for k in known[0]} if len(known) == len(answers) else None
        return joined

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@contextlib.contextmanager
def _bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Children that are started inside inherit these cores, before any library of theirs counts cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(cfg: BenchConfig) -> dict[str, Any]:
    """Measure everything that `cfg` asks for; tables go to stdout, progress to stderr, all numbers into the result."""
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(cfg).items()},
        "flops_per_token": FLOPS_FORMULA,
        "memory": MEMORY_MEANING,
        "import_seconds": measure_imports(cfg.import_repeats) if cfg.import_repeats else {},
        "cases": [],
    }
    print(head_text(results))
    peers, skipped = _available(cfg)
    for size in cfg.sizes:
        for dtype in cfg.dtypes:
            cases = [
                ({"threads": n}, {name: [Case(name, size, dtype, n, cfg.compile)] for name in ("matmul", *peers)}, skipped)
                for n in cfg.threads
            ]
            if cfg.tensor_parallel:
                cases.append(({"threads": 2, "tensor_parallel": 2}, _tensor_parallel_cases(size, dtype, cfg.compile), {}))
            for labels, members, left_out in cases:
                label = {"size": size, "dtype": dtype, **labels}
                results["cases"].append(measure_case(label, members, left_out, cfg))
                print("\n" + case_text(results["cases"][-1]), flush=True)
                save(results, cfg.out)
    return results


def _available(cfg: BenchConfig) -> tuple[list[str], dict[str, str]]:
    """The peers that can be measured here, and why the others cannot."""
    skipped = {}
    for name in cfg.peers:
        package = NEEDS.get(name)
        try:
            found = package is None or importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # of a package's parent
            found = False
        if not found:
            skipped[name] = f"{package.replace('.', '-') if package else name}: not installed"
        elif name == "megatron":
            skipped[name] = "megatron-core is installed, but nobody has written and tested a peer for it yet"
        elif name == "module-compiled" and not cfg.compile:
            skipped[name] = "--no-compile"
    return [name for name in cfg.peers if name not in skipped], skipped


def _tensor_parallel_cases(size: str, dtype: str, compile: bool) -> dict[str, list[Case]]:
    return {
        "matmul": [Case("matmul", size, dtype, 2)],
        "fmeg": [Case("fmeg", size, dtype, 2, compile)],
        "fmeg-tp2": [Case("fmeg", size, dtype, 1, compile, rank, 2) for rank in range(2)],
    }


def measure_case(
    label: dict[str, Any], members: dict[str, list[Case]], skipped: dict[str, str], cfg: BenchConfig
) -> dict[str, Any]:
    """Build all peers, one after the other, then let them take turns."""
    size = SIZES[label["size"]]
    title = _title(label)
    peers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    matmul: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fmeg-bench-", ignore_cleanup_errors=True)))
        running: dict[str, Peer] = {}

        def fail(name: str, error: PeerError) -> None:
            failed[name] = str(error)
            running.pop(name, None)
            _say(f"{title}: {name} failed: {error}")

        for name, cases in members.items():
            _say(f"{title}: {name}: building")
            meeting = str(scratch / f"{name}-meeting") if len(cases) > 1 else None
            running[name] = Peer(name, [dataclasses.replace(case, rendezvous=meeting) for case in cases], scratch)
            stack.callback(running[name].close)
            if name != "matmul":
                try:
                    peers[name] = _warm_up(running[name], cfg)
                except PeerError as error:
                    fail(name, error)
        for i in range(cfg.rounds):
            order = list(running)
            for name in order[i % len(order) :] + order[: i % len(order)]:
                plan = peers[name]["plan"] if name != "matmul" else {"rounds": cfg.rounds, "steps": 1}
                if i >= plan["rounds"]:
                    continue
                _say(f"{title}: round {i + 1} of {cfg.rounds}: {name}")
                try:
                    if name == "matmul":
                        matmul += running[name].ask("run 1")[0]["products"]
                    else:
                        peers[name]["rounds"].append({"round": i, **running[name].run(f"run {plan['steps']}")})
                except PeerError as error:
                    fail(name, error)
    measured = {name: peer for name, peer in peers.items() if name not in failed}
    best = max(matmul, key=lambda m: m["gflops"], default=None)
    return {
        **label,
        "model": dataclasses.asdict(size),
        "parameters": size.parameters,
        "flops_per_token": size.flops_per_token,
        "matmul_peak": best,
        "matmul": matmul,
        "peers": {name: peer | summarize(name, measured, size, best) for name, peer in measured.items()},
        "skipped": skipped,
        "failed": failed,
    }


def _warm_up(peer: Peer, cfg: BenchConfig) -> dict[str, Any]:
    """The first step, which compiles, then up to three whose memory is measured, and how many the clock allows after."""
    first = peer.run("start")
    warm = []
    for _ in range(3):
        warm.append(peer.run("memory"))
        if warm[-1]["wall"] > cfg.seconds_per_peer / 10:
            break
    seconds = min(w["wall"] for w in warm)
    steps = max(1, min(cfg.steps, int(cfg.seconds_per_peer / (cfg.rounds * seconds))))
    rounds = max(1, min(cfg.rounds, int(cfg.seconds_per_peer / (steps * seconds))))
    _say(f"  first step {first['wall']:.1f} s, then {seconds:.3f} s: {rounds} rounds of {steps}")
    return {
        "parameters": first["parameters"],
        "note": first["note"],
        "first": first,
        "warm": warm,
        "plan": {"rounds": rounds, "steps": steps},
        "rounds": [],
    }


def summarize(name: str, peers: dict[str, Any], size: Size, peak: dict[str, Any] | None) -> dict[str, Any]:
    """A peer's medians over rounds, and its ratios to fmeg: medians of the ratios in the same round."""
    peer = peers[name]
    seconds = statistics.median(r["wall"] / r["steps"] for r in peer["rounds"])
    cpu = statistics.median(r["cpu"] / r["steps"] for r in peer["rounds"])
    gflops = size.flops_per_token * size.tokens / seconds / 1e9
    memory = [w["memory"] for w in peer["warm"]]
    losses = [*peer["first"]["losses"], *(x for part in (*peer["warm"], *peer["rounds"]) for x in part["losses"])]
    return {
        "tokens_per_second": size.tokens / seconds,
        "seconds_per_step": seconds,
        "cpu_seconds_per_step": cpu,
        "gflops": gflops,
        "share_of_matmul_peak": None if peak is None else gflops / peak["gflops"],
        "compile_seconds": peer["first"]["wall"] - seconds,
        "compile_cpu_seconds": peer["first"]["cpu"] - cpu,
        "peak_bytes_above_steady": None if None in memory else max(m["peak"] - m["before"] for m in memory),
        "losses": losses,
        "fmeg_speed": ratio(peers, name, "wall", invert=True),
        "fmeg_cpu": ratio(peers, name, "cpu", invert=False),
    }


def ratio(peers: dict[str, Any], name: str, what: str, *, invert: bool) -> dict[str, float] | None:
    """fmeg's `what` per step over the peer's in the same round, or the inverse: median, smallest and largest."""
    if "fmeg" not in peers:
        return None
    ours, theirs = ({r["round"]: r[what] / r["steps"] for r in peers[who]["rounds"]} for who in ("fmeg", name))
    both = [theirs[i] / ours[i] if invert else ours[i] / theirs[i] for i in sorted(ours.keys() & theirs.keys())]
    return {"median": statistics.median(both), "min": min(both), "max": max(both)}


def measure_imports(repeats: int) -> dict[str, Any]:
    """Seconds of `import fmeg` and of `import torch`, each in a fresh process, in turns; once before, to fill file caches."""
    seconds: dict[str, list[float]] = {"fmeg": [], "torch": []}
    _say("import times")
    for i in range(repeats + 1):
        for name in sorted(seconds, reverse=i % 2 == 1):
            code = f"import time; start = time.perf_counter(); import {name}; print(time.perf_counter() - start)"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1]
                raise ValueError(f"`import {name}` fails: {reason}; install fmeg, or put its root on PYTHONPATH")
            if i > 0:
                seconds[name].append(float(done.stdout))
    return {name: {"median": statistics.median(all_), "all": all_} for name, all_ in seconds.items()}


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in info)}
    flags = fields.get("flags", "").split()
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / part).read_text().strip() for part in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    memory = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    versions = {}
    for package in ("torch", "jax", "jaxlib", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "cpu": fields.get("model name", platform.machine()),
        "isa": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16") if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "caches": caches,
        "memory_gib": round(int(memory) / 2**20, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "load_average": os.getloadavg()[0],
    }


def _commit() -> str | None:
    """The checkout's commit, marked where fmeg/ or the scripts differ from it; None outside of git."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=SCRIPTS.parent, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "fmeg", "scripts")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def head_text(results: dict[str, Any]) -> str:
    """What all tables share."""
    machine, imports = results["machine"], results["import_seconds"]
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    config = results["config"]
    import_text = ", ".join(f"import {name} {seconds['median']:.2f} s" for name, seconds in imports.items())
    import_text = f"{import_text} (medians of fresh processes)" if imports else "import times not measured"
    return f"""# Train step, fmeg and peers

- {machine["cpu"]} ({", ".join(machine["isa"])}), {machine["cores"]} cores, {caches}, {machine["memory_gib"]} GiB
- {machine["system"]}, Python {machine["python"]}, {versions}
- {machine["date"]}, commit {machine["commit"]}, load average at the start {machine["load_average"]:.2f}
- {import_text}
- {config["rounds"]} rounds of {config["steps"]} steps, fewer for a peer that would take over {config["seconds_per_peer"]:g} s;
  medians over rounds
- FLOP per token: {results["flops_per_token"]}
- speed and CPU: fmeg's over the peer's, the median of the ratios within a round (smallest to largest). CPU: user and system
  seconds of a step; below 1, fmeg needs less
- peak: the best fp32 matrix product of the model's largest shapes, by torch.mm and oneDNN, measured in the same rounds
- compile: the first step less a later one, with empty caches: imports, tracing and compiling, in seconds (and CPU seconds of
  the process and its children)
- memory: {results["memory"]}"""


def case_text(case: dict[str, Any]) -> str:
    """One case as a Markdown table, aligned to be read as it is."""
    model, peak = case["model"], case["matmul_peak"]
    lines = [
        f"## {_title(case)}",
        "",
        f"{case['parameters']:,} parameters, batch {model['batch']} x {model['sequence']}, "
        f"{case['flops_per_token'] / 1e6:.1f} MFLOP per token, "
        + (f"peak {peak['gflops']:.1f} GFLOP/s ({peak['kernel']}, {peak['shape']})" if peak else "peak unknown"),
        "",
    ]
    last = min((len(peer["losses"]) for peer in case["peers"].values()), default=1)
    header = ["peer", "tokens/s", "fmeg/peer speed", "fmeg/peer CPU", "GFLOP/s", "of peak", "compile s (CPU)", "memory MiB"]
    rows = [[*header, f"loss 1, {last}"]]
    for name, peer in case["peers"].items():
        share, memory = peer["share_of_matmul_peak"], peer["peak_bytes_above_steady"]
        rows.append(
            [
                name,
                f"{peer['tokens_per_second']:,.0f}",
                _ratio_text(peer["fmeg_speed"]),
                _ratio_text(peer["fmeg_cpu"]),
                f"{peer['gflops']:.1f}",
                "-" if share is None else f"{share:.0%}",
                f"{peer['compile_seconds']:.1f} ({peer['compile_cpu_seconds']:.1f})",
                "-" if memory is None else f"{memory / 2**20:,.0f}",
                f"{peer['losses'][0]:.3f}, {peer['losses'][last - 1]:.3f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
        if row is rows[0]:
            lines.append(f"|{'|'.join('-' * (w + 2) if i == 0 else '-' * (w + 1) + ':' for i, w in enumerate(widths))}|")
    notes = [f"{name}: {peer['note']}" for name, peer in case["peers"].items() if peer["note"]]
    notes += [f"{name} skipped ({why})" for name, why in case["skipped"].items()]
    notes += [f"{name} FAILED ({why})" for name, why in case["failed"].items()]
    return "\n".join([*lines, *(["", "; ".join(notes)] if notes else [])])


def _title(case: dict[str, Any]) -> str:
    threads = f"{case['threads']} thread{'s' if case['threads'] > 1 else ''}"
    if "tensor_parallel" in case:
        threads = "2 tensor-parallel processes of 1 thread against 1 process of 2 threads"
    return f"{case['size']}, {case['dtype']}, {threads}"


def _ratio_text(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"


def save(results: dict[str, Any], out: Path | None) -> None:
    """results.json, table.md and chart.png of the cases so far, so that a run that is stopped leaves what it has."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "table.md").write_text("\n\n".join([head_text(results), *map(case_text, results["cases"])]) + "\n")
    draw_chart(results["cases"], out / "chart.png")


def draw_chart(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of tokens per second, relative to the case's fastest torch peer; without one, to the fastest of all."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [case for case in cases if case["peers"]]
    if not shown:
        return
    fig, all_axes = plt.subplots(
        len(shown), 1, figsize=(8, sum(1.2 + 0.35 * len(case["peers"]) for case in shown)), squeeze=False, layout="constrained"
    )
    for ax, case in zip(all_axes[:, 0], shown, strict=True):
        speeds = {name: peer["tokens_per_second"] for name, peer in case["peers"].items()}
        candidates = {name: speed for name, speed in speeds.items() if name in TORCH_PEERS} or speeds
        base = max(candidates, key=candidates.__getitem__)
        values = [speed / speeds[base] for speed in speeds.values()]
        colors = ["tab:blue" if name.startswith("fmeg") else "0.7" for name in speeds]
        bars = ax.barh(list(speeds), values, color=colors)
        ax.bar_label(
            bars, [f"{value:.2f}   {speed:,.0f} tokens/s" for value, speed in zip(values, speeds.values(), strict=True)]
        )
        ax.invert_yaxis()
        ax.set_xlim(0, 1.4 * max(values))
        ax.axvline(1, color="0.3", linewidth=0.8)
        ax.set_title(f"{_title(case)}\ntokens/s relative to {base}", fontsize=10, loc="left")
    fig.savefig(path, dpi=130)
    plt.close(fig)


def parse_args(argv: Sequence[str]) -> BenchConfig:
    """A BenchConfig from flags."""
    import tyro

    peers = "\n".join(f"  {name}: {what}" for name, what in PEERS.items())
    return tyro.cli(
        BenchConfig,
        args=argv,
        config=(tyro.conf.HelptextFromCommentsOff,),
        description=(
            "Measure fmeg's train step side by side with peers that compute the same model. Each is a process of its own; they "
            "take turns, and what is compared is the ratio within a round.\n\n"
            f"Peers:\n{peers}\n\nFLOP per token: {FLOPS_FORMULA}.\nMemory: {MEMORY_MEANING}."
        ),
    )


def check(cfg: BenchConfig) -> None:
    """Refuse what cannot be measured: ValueError in one line."""
    for name, allowed in (("sizes", SIZES), ("dtypes", DTYPES), ("peers", PEERS)):
        given = getattr(cfg, name)
        for one in given:
            if one not in allowed:
                raise ValueError(f"--{name} holds {one!r}: must be of {', '.join(allowed)}")
        if not given or len(set(given)) != len(given):
            raise ValueError(f"--{name} is {given}: name each at most once, and at least one of {', '.join(allowed)}")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    if not cores:
        raise ValueError(f"the platform is {sys.platform}: affinity and memory are read the way Linux gives them; use Linux")
    for n in (*cfg.threads, *((2,) if cfg.tensor_parallel else ())):
        if not 1 <= n <= cores:
            raise ValueError(f"{n} threads asked for: must be in 1 .. {cores}, the cores that this process may use")
    for name in ("rounds", "steps", "seconds_per_peer"):
        if getattr(cfg, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(cfg, name)}: must be above 0")


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def main() -> None:
    """Parse the command line and measure; an error that a user can mend is one line and exit status 2, a failed peer 1."""
    try:
        cfg = parse_args(sys.argv[1:])
        check(cfg)
        results = run(cfg)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(1 if any(case["failed"] for case in results["cases"]) else 0)


if __name__ == "__main__":
    main()
