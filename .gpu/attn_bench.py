"""Bits and times of attention + combine alone, for several constants. From the repository's root:

    PYTHONPATH=. python3 .gpu/attn_bench.py [--quick] [--only NAME ...] [--no-warm]

Prints a table of us a layer (attention + combine; in brackets attention alone) and writes $OUT/attn_bench.json.
"""

import argparse, contextlib, dataclasses, importlib.util, json, os, statistics, subprocess, sys, time, traceback
from pathlib import Path

sys.path.insert(0, os.getcwd())
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
from terra.engine.graph.kernels import attention
from terra.engine.graph.kernels.launch import DeviceLimits
from terra.engine.graph.kv_cache import KVTarget

spec = importlib.util.spec_from_file_location("attention_before", Path(__file__).with_name("attention_before.py"))
before = importlib.util.module_from_spec(spec)
sys.modules["attention_before"] = before
spec.loader.exec_module(before)

F8, BF16 = torch.float8_e4m3fn, torch.float16 if INTERPRETED else torch.bfloat16
HEADS, KV_HEADS, DIM, BLOCK = (4, 2, 32, 30) if INTERPRETED else (32, 4, 64, 582)
LENGTH = 768 if INTERPRETED else 14720  # 25 frames and 64 drafts
LAYERS = 2 if INTERPRETED else 22
OUT = Path(os.environ.get("OUT", "/tmp/attn_out"))

# What each variant sets: field of _WIDE, or a constant of the module.
VARIANTS = {
    "before": None,
    "64x4w": {},
    "64x4w s2": {"stages": 2},
    "64x4w s4": {"stages": 4},
    "128x8w": {"block_queries": 128, "num_warps": 8, "ctas_per_sm": 1},
    "128x8w s5": {"block_queries": 128, "num_warps": 8, "ctas_per_sm": 1, "stages": 5},
    "singles/4": {"ctas_per_sm": 4},
    "singles/1": {"ctas_per_sm": 1},
    "bundle4": {"_BUNDLE": 4, "_BUNDLES_AHEAD": 8},
    "bundle7": {"_BUNDLE": 7, "_BUNDLES_AHEAD": 4},
    "bundle16": {"_BUNDLE": 16, "_BUNDLES_AHEAD": 2},
    "bundle4 128x8w": {"_BUNDLE": 4, "_BUNDLES_AHEAD": 8, "block_queries": 128, "num_warps": 8, "ctas_per_sm": 1},
    "keys first": {"keys_first": True},
    "narrow": {"block_queries": 1 << 30},
}
QUICK = ["before", "64x4w", "128x8w", "bundle4", "keys first"]


@contextlib.contextmanager
def constants(settings):
    module = before if settings is None else attention
    kept = {}
    wide = {}
    for name, value in (settings or {}).items():
        if name.startswith("_"):
            kept[name] = getattr(module, name)
            setattr(module, name, value)
        else:
            wide[name] = value
    if wide:
        kept["_WIDE"] = module._WIDE
        module._WIDE = dataclasses.replace(module._WIDE, **wide)
    try:
        yield module
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def limits():
    if INTERPRETED:
        return DeviceLimits(4, 1 << 30, False)
    from terra.engine.graph.kernels.launch import device_limits

    return device_limits(torch.device("cuda"))


def make(slots, layers, cache_dtype, kind="normal", seed=0):
    """Keys and values of layers, in the cache's type."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    made = []
    for _ in range(layers):
        shape = (slots, KV_HEADS, LENGTH, DIM)
        if slots * layers > 64:  # random numbers of a part, repeated
            shape = (1, KV_HEADS, LENGTH, DIM)
        keys = torch.randn(shape, generator=generator, device=DEVICE)
        values = torch.randn(shape, generator=generator, device=DEVICE)
        if kind == "range":  # magnitudes over many powers of two, among keys, dims and values
            keys *= torch.exp2(6 * torch.rand(shape, generator=generator, device=DEVICE) - 4)
            values *= torch.exp2(14 * torch.rand(shape, generator=generator, device=DEVICE) - 8)
        if kind == "spikes":  # few keys take nearly all the weight, others cancel
            at = torch.randint(0, LENGTH, (LENGTH // 40,), generator=generator, device=DEVICE)
            keys[:, :, at] *= 12
            values *= torch.where(torch.rand(shape, generator=generator, device=DEVICE) < 0.02, 100.0, 1.0)
        limit = 440.0 if cache_dtype == F8 else (3e4 if INTERPRETED else 1e30)
        keys = keys.clamp(-limit, limit).to(cache_dtype).expand(slots, -1, -1, -1).contiguous()
        values = values.mT.clamp(-limit, limit).to(cache_dtype).expand(slots, -1, -1, -1).contiguous()
        made.append((keys, values))
    return made


def target(cache, slots, width, first):
    keys, values = cache
    start = torch.full((slots,), first, device=DEVICE)
    positions = start[:, None] + torch.arange(width, device=DEVICE)
    table = torch.zeros(LENGTH, DIM, device=DEVICE, dtype=BF16)
    return KVTarget(table, table, positions, start, keys[:slots], values[:slots])


def check_bits(module, cache_dtype, quick):
    """Differences between tokens alone and in wide passes: a list of strings, empty if all bits are equal."""
    found = []
    lim = limits()
    slots = 1 if INTERPRETED else 16
    widths = (33,) if INTERPRETED else (8, 32, 64)
    firsts = (7, 300) if INTERPRETED else (1, 582 * 3 - 7, 582 * 11 + 100, 582 * 22 - 7)
    compared = 0
    for kind in ("normal", "range") if INTERPRETED else ("normal", "range", "spikes"):
        cache = make(slots, 1, cache_dtype, kind, seed=1)[0]
        generator = torch.Generator(DEVICE).manual_seed(2)
        queries = torch.randn(slots, max(widths), HEADS, DIM, generator=generator, device=DEVICE)
        queries = (queries * (1.0 if kind == "normal" else 4.0)).to(BF16)
        for first in firsts[::-1][: 2 if quick else None]:
            tokens = sorted({0, 1, 7, 31, 32, 63} & set(range(max(widths))))
            alone = {}
            for token in tokens:
                one = queries[:1, token : token + 1].contiguous()
                alone[token] = module.cached_attention(one, target(cache, 1, 1, first + token), lim)[0, 0]
            together = queries[:, :1].contiguous()
            batches = {"16x1": module.cached_attention(together, target(cache, slots, 1, first), lim)}
            few = DeviceLimits(1, lim.shared_memory, lim.pdl)  # one CTA has all keys
            batches["16x1, one SM"] = module.cached_attention(together, target(cache, slots, 1, first), few)
            for width in widths:
                for count in (1, slots):
                    some = queries[:count, :width].contiguous()
                    batches[f"{count}x{width}"] = module.cached_attention(some, target(cache, count, width, first), lim)
            for name, result in batches.items():
                for token in tokens:
                    if token < result.shape[1]:
                        compared += 1
                        if not torch.equal(result[0, token], alone[token]):
                            off = (result[0, token].float() - alone[token].float()).abs().max().item()
                            found.append(f"{kind} first {first} {name} token {token}: {off:.2e}")
                        if not torch.isfinite(result[0, token].float()).all():
                            found.append(f"{kind} first {first} {name} token {token}: not finite")
            # Against torch in float64.
            width = widths[-1]
            result = batches[f"1x{width}"][0].double()
            keys, values = (part[0].double() for part in cache)
            total = first + width
            q = queries[0, :width].double().view(width, KV_HEADS, -1, DIM)
            score = torch.einsum("whgd,hkd->whgk", q, keys[:, :total]) * DIM**-0.5
            own = first + torch.arange(width, device=DEVICE)
            score.masked_fill_((torch.arange(total, device=DEVICE) > own[:, None])[:, None, None], float("-inf"))
            expected = torch.einsum("whgk,hdk->whgd", score.softmax(-1), values[..., :total]).reshape(result.shape)
            error = ((result - expected).norm() / expected.norm()).item()
            if not error < 2e-2:
                found.append(f"{kind} first {first}: relative error {error:.2e}")
    return compared, found


class Nothing:
    """In place of `_combine`."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


def timed(module, caches, slots, width, first, rounds, combine=True):
    """Microseconds a layer of attention + combine: medians of rounds of graph replays."""
    lim = limits()
    queries = torch.randn(slots, width, HEADS, DIM, device=DEVICE, dtype=BF16)
    targets = [target(cache, slots, width, first) for cache in caches]
    kept = module._combine
    if not combine:
        module._combine = Nothing()
    try:
        def work():
            for one in targets:
                module.cached_attention(queries, one, lim)

        if INTERPRETED:
            work()
            return 0.0
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work()
            side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        found = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(5):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1000 / 5 / len(targets))
        return statistics.median(found)
    finally:
        module._combine = kept


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--no-warm", action="store_true", help="do not compile in processes of their own first")
    parser.add_argument("--compile", action="store_true", help="only compile (used by the processes)")
    arguments = parser.parse_args()
    names = arguments.only or (QUICK if arguments.quick else list(VARIANTS))
    begun = time.time()
    if not (arguments.no_warm or arguments.compile or INTERPRETED):
        waiting = [
            subprocess.Popen([sys.executable, __file__, "--compile", "--only", name], stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
            for name in names
        ]
        for process in waiting:
            with contextlib.suppress(Exception):
                process.wait(timeout=180)
        print(f"compiled in {time.time() - begun:.0f} s", flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    shapes = [(1, 33)] if INTERPRETED else [(1, 32), (1, 64), (1, 1), (4, 32), (16, 8), (64, 1)]
    contexts = [2, 5] if INTERPRETED else [3, 22]
    results = {"bits": {}, "us": {}}
    if not INTERPRETED:
        results["device"] = torch.cuda.get_device_name()

    def save():
        if not arguments.compile:
            (OUT / "attn_bench.json").write_text(json.dumps(results, indent=1))

    types = {"bf16": BF16, "fp8": F8}
    if arguments.compile:
        for slots, width in shapes:
            for kind in types.values():
                caches = make(slots, 1, kind)
                for name in names:
                    with contextlib.suppress(Exception), constants(VARIANTS[name]) as module:
                        module.cached_attention(torch.randn(slots, width, HEADS, DIM, device=DEVICE, dtype=BF16),
                                                target(caches[0], slots, width, 1739), limits())
        torch.cuda.synchronize()
        return
    for type_name, kind in types.items():
        for name in names:
            try:
                with constants(VARIANTS[name]) as module:
                    compared, found = check_bits(module, kind, arguments.quick or name not in QUICK)
                results["bits"][f"{type_name} {name}"] = found
                print(f"bits {type_name} {name}: {compared} compared, {len(found)} differ {found[:6]}", flush=True)
            except Exception as error:
                results["bits"][f"{type_name} {name}"] = [repr(error)]
                print(f"bits {type_name} {name}: FAILED {str(error)[:300]!r}", flush=True)
                traceback.print_exc(limit=3)
            save()
    rows = {}
    for type_name, kind in types.items():
        for slots, width in shapes:
            layers = LAYERS if slots < 4 else (6 if slots < 64 else 2)
            caches = make(slots, layers, kind)
            for context in contexts:
                first = context * BLOCK - 7
                for name in names:
                    key = f"{type_name} {slots}x{width} @{context}"
                    try:
                        with constants(VARIANTS[name]) as module:
                            both = timed(module, caches, slots, width, first, 9)
                            alone = timed(module, caches, slots, width, first, 5, combine=False)
                        rows.setdefault(key, {})[name] = f"{both:.1f} ({alone:.1f})"
                        results["us"].setdefault(key, {})[name] = [both, alone]
                    except Exception as error:
                        rows.setdefault(key, {})[name] = "failed"
                        print(f"time {key} {name}: {str(error)[:200]!r}", flush=True)
                save()
            del caches
            if not INTERPRETED:
                torch.cuda.empty_cache()
    print(f"\nus a layer, attention + combine (attention alone); {results.get('device')}; {time.time() - begun:.0f} s")
    for type_name in types:
        keys = [key for key in rows if key.startswith(type_name)]
        print(f"{type_name:16}" + "".join(f"{key.split(' ', 1)[1]:>16}" for key in keys))
        for name in names:
            print(f"{name:16}" + "".join(f"{rows[key].get(name, '-'):>16}" for key in keys))
    for name, found in results["bits"].items():
        print(f"bits {name}: {'equal' if not found else f'{len(found)} DIFFER'}")


if __name__ == "__main__":
    main()
