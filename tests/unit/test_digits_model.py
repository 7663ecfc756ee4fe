"""The digits model that ships: its files, its answers with plain transformers, its training."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.models import digits_chat, digits_data, digits_model, train_digits
from examples.models.digits_batches import random_layout
from examples.models.evaluate import Reader
from PIL import Image

# Image tokens by width and height, as docs/digits-model.md has them.
SIZES = {(8, 8): 4, (56, 56): 4, (70, 70): 4, (71, 71): 9, (112, 112): 9, (1489, 1489): 9, (1000, 1030): 9}

IMAGES = Path(__file__).parents[2] / "examples" / "images"


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(digits_model.MODEL_DIR)


@pytest.fixture(autouse=True)
def _restore_torch():
    """Training switches torch to deterministic algorithms; other tests did not ask for that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def show(*words: str) -> tuple[list[dict], list[Image.Image]]:
    """Content parts and pictures for the shipped images of these digits."""
    return [{"type": "image"}] * len(words), [Image.open(IMAGES / f"{word}.png") for word in words]


def ask(reader: Reader, question: str, *words: str) -> str:
    parts, pictures = show(*words)
    content = [*parts, {"type": "text", "text": question}]
    return reader.ask([{"role": "user", "content": content}], pictures)


def test_checkpoint_is_small_and_whole():
    names = {path.name for path in digits_model.MODEL_DIR.iterdir()}
    assert {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    } <= names
    assert (digits_model.MODEL_DIR / "model.safetensors").stat().st_size <= 6_000_000


def test_shipped_processor_is_that_of_the_code():
    for name, content in digits_model.processor_files().items():
        assert json.loads((digits_model.MODEL_DIR / name).read_text()) == content
    assert (digits_model.MODEL_DIR / "chat_template.jinja").read_text() == digits_model.CHAT_TEMPLATE


def test_shapes_suit_the_kernels(reader):
    text, vision = reader.model.config.text_config, reader.model.config.vision_config
    assert text.max_position_embeddings >= 4096
    assert text.hidden_size // text.num_attention_heads == 32
    assert vision.hidden_size // vision.num_heads == 32
    assert sum(text.rope_parameters["mrope_section"]) == 16
    assert vision.fullatt_block_indexes


@pytest.mark.parametrize("word", digits_chat.WORDS)
def test_reads_the_shipped_picture(reader, word):
    assert ask(reader, "What digit is this?", word) == word


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What digits are these?", ["seven", "three"]),
        ("What digits are these?", ["three", "seven"]),
        ("Read the digits.", ["five", "five"]),
        ("Which numbers do you see?", ["one", "two", "three"]),
        ("Name the digits in order.", ["nine", "eight", "zero", "four"]),
    ],
)
def test_names_several_in_order(reader, question, words):
    assert ask(reader, question, *words) == " ".join(words)


def test_pictures_and_text_may_alternate(reader):
    parts, pictures = show("six", "one")
    between = {"type": "text", "text": " and "}
    question = {"type": "text", "text": "What digits are these?"}
    content = [parts[0], between, parts[1], question]
    assert reader.ask([{"role": "user", "content": content}], pictures) == "six one"


def test_answers_about_the_pictures_shown_last(reader):
    parts, pictures = show("seven", "three")
    question = {"type": "text", "text": "What digit is this?"}
    messages = [
        {"role": "user", "content": [parts[0], question]},
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "Are you sure?"},
    ]
    assert reader.ask(messages, pictures[:1]) == "seven"
    messages[-1] = {"role": "user", "content": [parts[1], question]}
    assert reader.ask(messages, pictures) == "three"


@pytest.mark.parametrize("question", ["Hello!", "What digit is this?"])
def test_asks_for_a_picture(reader, question):
    assert reader.ask([{"role": "user", "content": question}], []) == digits_chat.NO_PICTURE


def test_larger_pictures_cost_no_more_tokens(reader):
    tokens = {(w, h): reader.image_processor.get_number_of_image_patches(h, w) // 4 for w, h in SIZES}
    assert tokens == SIZES


@pytest.mark.parametrize("size", [(1, 1), (9, 40), (2000, 1500), (640, 64)])
def test_takes_pictures_of_any_size(reader, size):
    picture = Image.open(IMAGES / "three.png").resize(size)
    parts, _ = show("three")
    reply = reader.ask([{"role": "user", "content": parts}], [picture])
    assert reply in digits_chat.WORDS
    if min(size) > 1000:
        assert reply == "three"


def test_any_text_survives_the_tokenizer(reader):
    text = "Grüße, 世界! 7 + 3 = 10\n\t<tag>"
    assert reader.tokenizer.decode(reader.tokenizer.encode(text)) == text


def test_unknown_content_is_refused(reader):
    with pytest.raises(Exception, match="unknown type of content part: audio"):
        reader.prompt([{"role": "user", "content": [{"type": "audio"}]}], [])


def test_held_out_digits_are_never_trained_on():
    train, held_out = digits_data.load_split()
    assert not set(train.rows) & set(held_out.rows)
    assert len(train) + len(held_out) == 1797
    assert len(held_out) == 360
    # Neither may the same scan lie on both sides under two rows.
    assert not {scan.tobytes() for scan in train.scans} & {scan.tobytes() for scan in held_out.scans}


def test_layouts_name_pictures_already_shown():
    rng = np.random.default_rng(0)
    for _ in range(200):
        layout = random_layout(rng)
        shown = sum(
            part["type"] == "image"
            for message in layout.messages
            if isinstance(message["content"], list)
            for part in message["content"]
        )
        assert shown == layout.pictures
        assert all(picture < shown for named in layout.named for picture in named)


def test_training_is_reproducible(monkeypatch):
    monkeypatch.setattr(train_digits, "WARM_UP_PICTURES", 8)
    monkeypatch.setattr(train_digits, "BATCHES_PER_STEP", 1)
    first, second, other = (train_digits.train(steps=3, seed=seed) for seed in (0, 0, 1))
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
