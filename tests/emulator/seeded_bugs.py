"""Bugs put into a copy of the persistent kernels, to see that the tests notice each of them.

The kernels themselves contain nothing of this: a bug replaces a text of a header. Since a build
takes long, one copy has all bugs, and a number at run time turns one of them on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
COPY = ROOT / "build" / "seeded-bugs"


@dataclass(frozen=True)
class Mutation:
    """A text that occurs once in a header, and its replacement; BUG says whether it is on."""

    number: int
    header: str  # below csrc/persistent
    text: str
    replacement: str

    def applied(self, original: str, mutated: str) -> str:
        """Adds this mutation to a header that may have others."""
        for header in (original, mutated):
            if (count := header.count(self.text)) != 1:
                raise ValueError(
                    f"Seeded bug {self.number} replaces a text that must occur once in "
                    f"csrc/persistent/{self.header}, but occurs {count} times: {self.text!r}"
                )
        is_on = f"(seeded_bug == {self.number})"
        return mutated.replace(self.text, self.replacement.replace("BUG", is_on))


def left_out(number: int, header: str, text: str, after: str = "") -> Mutation:
    """A bug that leaves out a text's first statement. ``after``: what stands before the text."""
    return Mutation(number, header, after + text, f"{after}if (!BUG) {text}")


LAST_WARP = "thread_index() / kWarpSize == kWarps - 1"
MUTATIONS = [
    # No barrier before sums are read.
    left_out(1, "forward.h", "sync_block();\n      clock().at("),
    left_out(1, "backward.h", "sync_block();\n      block_.clock.at("),
    # No barrier after flags are seen.
    left_out(2, "exchange.h", "sync_warp();\n  }\n\n private:"),
    # Flags are set without release.
    Mutation(
        3,
        "exchange.h",
        "store_release(count, count_of(i, tile));",
        "BUG ? store_relaxed(count, count_of(i, tile)) : store_release(count, count_of(i, tile));",
    ),
    # No barrier before flags are set.
    left_out(4, "exchange.h", "sync_warp();\n    if (thread.lane != 0) return;"),
    # A warp ends early.
    *(
        Mutation(5, header, text, f"if (BUG && {LAST_WARP}) return;\n  {text}")
        for header, text in (
            ("forward.h", "PersistentBlock<T> block(args, shared);"),
            ("backward.h", "BackwardBlock<T> block(args, shared);"),
        )
    ),
    # One slot for all steps.
    Mutation(6, "exchange.h", "i & slots.mask;", "BUG ? 0 : i & slots.mask;"),
    # One buffer of sums instead of two.
    left_out(7, "shared_memory.h", "turn ^= 1;"),
    # Nothing is sent.
    Mutation(
        8,
        "forward.h",
        "if (kIsLast && t == args().steps - 1) return;",
        "if (BUG || (kIsLast && t == args().steps - 1)) return;",
    ),
    Mutation(
        8,
        "backward.h",
        "constexpr int kInPacket = Operands<T>::kInPacket;",
        "if (BUG) return;\n    constexpr int kInPacket = Operands<T>::kInPacket;",
    ),
    # A tile is read too early.
    Mutation(
        9,
        "exchange.h",
        "wanted = count_of(i, tile);",
        "wanted = count_of(i, tile) - (BUG ? 1 : 0);",
    ),
    # Packets are not waited for.
    Mutation(
        10,
        "exchange.h",
        "int asked_for = kCount;",
        "if (BUG) return 0;\n    int asked_for = kCount;",
    ),
    # Packets may hold the NaN that marks memory as not sent.
    Mutation(
        11,
        "exchange.h",
        "  Packet packet;\n",
        "  if (BUG && bits == nan) bits = all_ones;\n  Packet packet;\n",
    ),
    # No barrier after weights are transposed.
    left_out(12, "backward.h", "sync_block();", after="All stages(block);\n  "),
    # Lanes transpose weights without a barrier in between.
    left_out(13, "backward_product.h", "sync_warp();", "packet.word[j];\n      }\n    }\n    "),
    # Not a bug: rounding gives that NaN, and packets must still not hold it.
    Mutation(
        15,
        "exchange.h",
        "uint32_t bits = Of::bits(value);",
        "uint32_t bits = Of::bits(value);\n  if (BUG && bits == nan) bits = all_ones;",
    ),
    # Numbers are truncated and not rounded to TF32.
    Mutation(
        16,
        "exchange.h",
        "return round_to_tf32(number);",
        "return BUG ? Traits<float>::bits(number) : round_to_tf32(number);",
    ),
    # The memory of the next kernel is not preset.
    Mutation(
        17,
        "forward.h",
        "if (args().next != 0) store_plain(",
        "if (args().next != 0 && !BUG) store_plain(",
    ),
    # Input gates are read before they have been copied.
    left_out(18, "forward.h", "input_gates_.wait();"),
    # The ring has no room for the item that is read.
    Mutation(19, "ring.h", "item % kRingItems", "item % (BUG ? kAhead : kRingItems)"),
]


def mutated_headers() -> dict[str, str]:
    """The text of each mutated header, with all of its bugs."""
    folder = ROOT / "csrc" / "persistent"
    headers: dict[str, str] = {}
    for mutation in MUTATIONS:
        original = (folder / mutation.header).read_text()
        headers[mutation.header] = mutation.applied(
            original, headers.get(mutation.header, original)
        )
    return headers


def seeded_sources() -> Path:
    """Copies the emulation's sources next to a copy of csrc with all bugs; returns the folder."""
    texts = {f"csrc/persistent/{name}": text for name, text in mutated_headers().items()}
    for path in [*(ROOT / "csrc").rglob("*.h"), *FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")]:
        text = path.read_text().replace("fusedrnn_emulated", "fusedrnn_seeded")  # its name
        texts.setdefault(str(path.relative_to(ROOT)), text)
    for name, text in texts.items():
        path = COPY / name
        if not path.exists() or path.read_text() != text:  # an unchanged file keeps its build
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}")  # another process may read it
            fresh.write_text(text)
            fresh.replace(path)
    return COPY / FOLDER.relative_to(ROOT)
