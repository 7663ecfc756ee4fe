"""Asks a running deployment about pictures, with the plain OpenAI client.

python examples/ask.py examples/images/seven.png
python examples/ask.py --question "What digits are these?" FIRST.png SECOND.png
"""

import argparse
import base64
import mimetypes
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a running deployment about pictures.")
    parser.add_argument("pictures", nargs="+", type=Path, metavar="PICTURE")
    parser.add_argument("--question", help="default: What digit is this?, or What digits are these?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    options = parser.parse_args()
    several = len(options.pictures) > 1
    question = options.question or ("What digits are these?" if several else "What digit is this?")

    try:
        answer = ask(options.url, question, options.pictures)
    except OpenAIError as error:
        sys.exit(f"{options.url} gives no answer: {error}")
    print(f"question  {question}")
    for picture in options.pictures:
        print(f"picture   {picture}")
    print(f"answer    {answer}")


def ask(url: str, question: str, pictures: list[Path]) -> str | None:
    """The answer to a question about pictures."""
    client = OpenAI(base_url=url, api_key="none is needed")
    content: list[Any] = [image_part(picture) for picture in pictures]
    content.append({"type": "text", "text": question})
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=64,
    )
    return answer.choices[0].message.content


def image_part(picture: Path) -> dict[str, Any]:
    """A picture as OpenAI's API takes it: inside the request, as a data URL."""
    kind = mimetypes.guess_type(picture)[0] or "image/png"
    data = base64.b64encode(picture.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


if __name__ == "__main__":
    main()
