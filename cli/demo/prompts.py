"""The demo's texts: a shared system prompt, a confidential document, questions about it.

The document is made of plain facts that a small model can look up, one a line, so that a
right answer shows that the restored KV is the document's.
"""

from __future__ import annotations

from typing import Final

SYSTEM: Final = (
    "<|im_start|>system\n"
    "You are the records clerk of a vault company. You answer questions about the vault register "
    "that you are given. Look the vault up in the register, then say in one short sentence what "
    "the register says. Do not guess, do not add anything that the register does not say, and "
    "keep the exact numbers and materials as they are written in the register. If a vault is not "
    "in the register, say that the register does not list it.<|im_end|>\n"
)

_MATERIALS: Final = (
    "gold bars",
    "silver coins",
    "copper plates",
    "pearl strings",
    "jade figures",
    "ivory combs",
    "amber beads",
    "bronze bells",
    "opal rings",
    "crystal cups",
)
_KEEPERS: Final = ("Ada", "Boris", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana")
_VAULTS: Final = 72


def document() -> str:
    """The confidential register, about 1,800 tokens of SmolLM2."""
    lines = ["<|im_start|>user\nVault register, confidential.\n"]
    for number in range(1, _VAULTS + 1):
        material = _MATERIALS[(number * 7) % len(_MATERIALS)]
        keeper = _KEEPERS[(number * 5) % len(_KEEPERS)]
        count = 3 + (number * 11) % 40
        lines.append(f"Vault number {number} holds {count} {material}. Its keeper is {keeper}.\n")
    return "".join(lines)


def question(vault: int) -> str:
    """The question about one vault, and the turn that the model answers."""
    return (
        f"What does vault number {vault} hold, and who is its keeper?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def expected(vault: int) -> str:
    """What the right answer has to contain: the count and the material."""
    return f"{3 + (vault * 11) % 40} {_MATERIALS[(vault * 7) % len(_MATERIALS)]}"


UNRELATED: Final = (
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n"
)
"""Warms an engine up without touching any text of the demo."""
