"""Chat templates: jinja2 programs inside a checkpoint that turn messages into one prompt string.

A template comes with the weights, so it is untrusted code: it runs in jinja2's immutable sandbox and sees
only plain JSON values. Filters, globals and whitespace rules follow transformers' `apply_chat_template`.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from specax.model.errors import CheckpointError


class _MessageError(Exception):
    """What a template raises through `raise_exception`: it refuses the caller's messages."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; for a prompt it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _MessageError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # jinja2 would print nothing here and fail only at a call; refuse a template that tries at all.
        raise jinja2.sandbox.SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One chat template; compiled at its first use, so that a broken one doesn't stop plain prompts."""

    def __init__(self, source: str) -> None:
        self.source = source

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"chat template, line {error.lineno}: {error.message}; pass prompts as plain text instead"
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text for `messages`; `variables` are further names that the template may read.

        Raises:
          CheckpointError: the template doesn't parse, or tries something that the sandbox forbids.
          ValueError: `messages` is not a non-empty list of dicts with `role` and `content`, it or a variable
            is not plain JSON data, or the template refuses or can't render these messages.
        """
        _check_messages(messages)
        names = {**variables, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            # A copy in plain JSON types: the template gets no object whose methods the sandbox doesn't know.
            plain = json.loads(json.dumps(names))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"chat messages and template variables must be plain JSON data: {error}"
            ) from error
        try:
            return self._compiled.render(plain)
        except CheckpointError:
            raise
        except _MessageError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except jinja2.sandbox.SecurityError as error:
            raise CheckpointError(f"chat template: the sandbox forbids this: {error}") from error
        except Exception as error:  # the template is a program: any error may come out of it
            raise ValueError(
                f"the chat template can't render these messages: {type(error).__name__}: {error}"
            ) from error


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(
            f"chat messages must be a non-empty list of {{'role', 'content'}} dicts, got {messages!r}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"chat message {index} must be a dict, got {message!r}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"chat message {index}: 'role' must be a string, got {message.get('role')!r}")
        content = message.get("content")
        # An assistant's message that only calls tools has no text of its own.
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"chat message {index}: 'content' must be a string or a list of parts, got {content!r}"
            )
