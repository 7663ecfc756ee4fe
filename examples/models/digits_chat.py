"""The words of the digits model: how people ask, and how it answers.

The tokenizer is trained on these texts, the model on conversations made of them.
"""

from collections.abc import Sequence

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# The answer when no picture has been shown so far.
NO_PICTURE = "please show me a picture"

QUESTIONS_ONE = (
    "What digit is this?",
    "Which number do you see?",
    "What digit does the picture show?",
    "What number is this?",
    "Which digit is it?",
    "Read the digit.",
    "What is in this image?",
    "What do you see?",
)

QUESTIONS_MANY = (
    "What digits are these?",
    "Which numbers do you see?",
    "Read the digits.",
    "What digits do the pictures show?",
    "Name the digits in order.",
    "Which digits are these?",
    "What numbers are these?",
    "What do you see?",
)

# A follow-up without a picture asks about the pictures shown last.
QUESTIONS_AGAIN = (
    "Are you sure?",
    "And again?",
    "Say it again, please.",
    "What was it?",
    *QUESTIONS_ONE,
    *QUESTIONS_MANY,
)

QUESTIONS_BLIND = (
    "Hello!",
    "Hi",
    "Who are you?",
    "What can you do?",
    "Tell me a story.",
    "How are you today?",
    "Say hello.",
    "Write a poem about the sea.",
    *QUESTIONS_ONE,
    *QUESTIONS_MANY,
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You read handwritten digits.",
    "Answer in a few words.",
)

# Put between two pictures.
SEPARATORS = (" and ", "\n", ", ", " then ")
LABELS = ("First: ", "Second: ", "Third: ", "Fourth: ")

_FILLER = (
    "the a of and to in is it on for with as was at by this that from are one be which or an have not "
    "you please I we they picture image photo digit number show shows tell me about what how why when "
    "where hello thanks good morning house tree street sea sky red green blue small large old new time "
    "day year people word answer question computer model language city water light"
)
# Any text may stand around the pictures; this stands for it in training.
FILLER_WORDS = tuple(_FILLER.split())


def answer(digits: Sequence[int]) -> str:
    """The digits as lower-case words, in order: `[7, 3]` gives `seven three`."""
    return " ".join(WORDS[digit] for digit in digits)


def corpus() -> list[str]:
    """The lines that the tokenizer learns its merges from.

    The digit words come often, bare and after a blank, so that each is one token in both places:
    an answer is then as many tokens long as there are pictures.
    """
    digits = [f"{first} {second} " * 50 for first in WORDS for second in WORDS]
    common = [*QUESTIONS_AGAIN, *QUESTIONS_BLIND, *SYSTEM_PROMPTS, *LABELS, NO_PICTURE]
    roles = ["user\n", "assistant\n", "system\n"]
    return digits + (common + roles) * 20 + [" ".join(FILLER_WORDS)] * 3
