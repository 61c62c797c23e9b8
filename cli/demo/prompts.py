"""The demo's texts: a shared system prompt, a confidential document, questions about it.

The questions are about the document's first entry, which even a very small model finds; that the
answers are right shows that the restored KV is the document's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SYSTEM: Final = (
    "<|im_start|>system\n"
    "You are the clerk of a small town. You answer questions about the town handbook that you are "
    "given. Look the place up in the handbook, then answer in one short sentence with exactly "
    "what the handbook says, and add nothing that the handbook does not say.<|im_end|>\n"
)

_KEEPERS: Final = """
    lighthouse: Ada Brandt, harbour: Boris Keller, library: Chen Wei, bakery: Dora Lind, museum:
    Emil Sato, observatory: Farah Aziz, windmill: Goran Petrov, bridge: Hana Novak, cathedral:
    Ivo Marino, theatre: Jana Dvorak, market: Karl Berg, stable: Lena Fischer, vineyard: Milan
    Kovac, orchard: Nora Holm, greenhouse: Otto Weiss, quarry: Petra Kral, mill: Quinn Hardy,
    ferry: Rosa Vega, railway: Stefan Lang, school: Tara Singh, hospital: Umar Khan, archive:
    Vera Popov, armoury: Walter Stone, aquarium: Xenia Roth, chapel: Yusuf Demir, fountain: Zoe
    Martin, garden: Anton Bauer, granary: Bella Cruz, hall: Cyril Dupont, inn: Diana Frost,
    pier: Gita Rao, rectory: Henk Visser, sawmill: Ines Costa, silo: Jonas Ek, spa: Kira Olsen,
    stadium: Luca Ricci, studio: Mina Park, tavern: Nils Dahl, tollhouse: Olga Smirnov, turret:
    Pablo Ruiz, villa: Rita Lopez, warehouse: Sven Lund, watermill: Tom Baker, well: Ursula
    Graf, workshop: Viktor Orlov
"""
_STONES: Final = ("granite", "brick", "timber", "marble", "slate", "iron", "clay", "glass")
_COLOURS: Final = ("green", "yellow", "grey", "blue", "white", "orange", "black", "red", "brown")


def document() -> str:
    """The confidential handbook, about 2,900 tokens of SmolLM2."""
    lines = ["<|im_start|>user\nTown handbook, confidential.\n"]
    for number, entry in enumerate(" ".join(_KEEPERS.split()).split(", ")):
        place, keeper = entry.split(": ")
        lines.append(
            f"The {place} is run by {keeper}. The {place} was built of "
            f"{_STONES[number * 7 % len(_STONES)]} and its door is "
            f"{_COLOURS[number * 4 % len(_COLOURS)]}. Visitors to the {place} ring the bell "
            f"{2 + number * 5 % 9} times and wait at the gate. \n"
        )
    lines.extend(
        f"On day {day} of the month the town council meets at {8 + day % 9} o'clock, and the "
        f"minutes of that day are kept for {day + 2} years in the archive.\n"
        for day in range(1, 32)
    )
    return "".join(lines)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the handbook, and what the right answer contains."""

    text: str
    expected: str


KEEPER: Final = Question(
    "Who runs the lighthouse?<|im_end|>\n<|im_start|>assistant\n", "Ada Brandt"
)
STONE: Final = Question(
    "What is the lighthouse built of?<|im_end|>\n<|im_start|>assistant\n", "granite"
)

UNRELATED: Final = (
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n"
)
"""Warms an engine up without touching any text of the demo."""
