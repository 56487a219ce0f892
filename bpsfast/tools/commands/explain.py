"""``bpsfast explain`` says what an error code or a line of a log means and what to do about it."""
from __future__ import annotations

import difflib
import inspect
import re
from dataclasses import dataclass

import click

from ...base import exit_codes, output
from ...hardware.verbs import completions
from ...hardware.verbs.completions import Completion
from ...orchestration import errors
from ...orchestration.errors import BpsError, ConfigError
from ..doctor import error_texts
from ..doctor.error_texts import ErrnoMeaning, LogMessage
from ..doctor.examination import CHECKS
from ..doctor.finding import Check


@click.command()
@click.argument("code", nargs=-1, required=True)
@output.options()
@exit_codes.exit_on_error
def command(code: tuple[str, ...], form: output.OutputOptions) -> None:
    """Explain what CODE means and what to do about it.

    CODE is a check of `bpsfast doctor`, the status of an RDMA completion (with the vendor error after a slash), an
    errno, an error class of bpsfast, an exit code, or lines from a log of perftest, rdma-core, the kernel, UCX or NCCL.

    \b
    bpsfast explain RD05
    bpsfast explain 12/129
    bpsfast explain IBV_WC_WR_FLUSH_ERR
    bpsfast explain ETIMEDOUT
    bpsfast explain exit 3
    bpsfast explain "Got completion with error 12, opcode 1, vendor err 129"
    """
    found = explain(" ".join(code))
    output.show(form, lambda: "\n\n".join(map(str, found)),
                [{"head": each.head, "lines": [{"label": label, "text": words} for label, words in each.lines]}
                 for each in found])

_CLASSES = {name: value for name, value in vars(errors).items()
            if inspect.isclass(value) and issubclass(value, BpsError)}
_STATUS = re.compile(r"\b(?:wc[. ]?)?(?:status|completion with error|error)\s*[=:]?\s*\(?(\d+)\)?", re.I)
#: status names that have no other meaning, so that they need no vendor error
_OF_COMPLETION = re.compile(
    r"(?:failed status|completion with (?:error|status)|\bwc[ ._](?:status|error)|cq error status)\s*[=:]?\s*\(?(\d+)|"
    r"\bfailed status [^()]{1,60}\((\d+)\)", re.I)
_VENDOR = re.compile(r"\b(?:vend(?:or)?[ _.]?(?:err(?:or)?|synd(?:rome)?)?|syndrom)\s*[=:]?\s*(0x[0-9a-f]+|\d+)", re.I)
#: errno 12, [Errno 12], err(-12), ret=12, rc = -12, status -110 of the kernel
_ERRNO = re.compile(r"\berrno\s*[=:]?\s*(\d+)|\bret\s*=\s*(\d+)|"
                    r"\b(?:err|error|rc|ret|status|returned|failed)(?: with)?\s*[=:(]*\s*-(\d+)\b", re.I)
_MOST_MEANINGS = 12


@dataclass(frozen=True)
class Explanation:
    """One meaning: a heading and labelled lines."""

    head: str
    lines: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join([self.head, *(line for label, words in self.lines
                                       for line in output.hanging(f"  {label + ':':<9} ", words))])


def explain(text: str) -> list[Explanation]:
    """Return the meanings of a code or pasted text, likely ones first; raise `ConfigError` with near names for none."""
    text = error_texts.plain(text).strip()
    found = _named(text) or _numbered(text) or _recognised(text)
    if not found:
        raise ConfigError(f"nothing is known about {text!r}: {_near(text)}")
    return found


def _named(text: str) -> list[Explanation]:
    """Return the meanings of a name."""
    text = re.sub(r"(?i)^(rd)(\d)$", r"\g<1>0\2", text)
    status = completions.by_name(text)
    found = [of_check(check) for check in CHECKS if text.upper() in (check.code, check.title.upper())]
    found += [of_completion(status)] if status is not None else []
    found += [of_errno(words) for words in error_texts.every() if text.upper() == words.name]
    found += [of_class(name, kind) for name, kind in _CLASSES.items()
              if text.rpartition(".")[2].lower() == name.lower()]
    return found[:1]


def _numbered(text: str) -> list[Explanation]:
    """Return the meanings of a number, "STATUS/VENDOR", "errno N", "exit N", "status N"."""
    found = re.fullmatch(r"(?:(status|wc|vendor|errno|exit)[ _=:]*)?(0x[0-9a-f]+|\d+)(?:\s*/\s*(0x[0-9a-f]+|\d+))?",
                         text, re.I)
    if not found:
        return []
    kind, number = (found[1] or "").lower(), int(found[2], 0)
    if found[3]:
        return [of_completion(completions.explain(number, int(found[3], 0)))]
    meanings = []
    if kind in ("", "status", "wc") and number in completions.NAMES:
        meanings.append(of_completion(completions.explain(number)))
    if kind in ("", "vendor") and number in completions.BY_VENDOR_ERROR:
        meanings.append(of_completion(completions.explain(completions.BY_VENDOR_ERROR[number], number)))
    if kind in ("", "errno") and (words := error_texts.explain(number)):
        meanings.append(of_errno(words))
    if (kind == "exit" or (not kind and number in exit_codes.WORDS)) and (text := exit_codes.words_of(number)):
        meanings.append(Explanation(f"exit code {number} of bpsfast", (("means", text),)))
    return meanings


def _recognised(text: str) -> list[Explanation]:
    """Return the meanings of a pasted text: completions (flushed requests last), messages, errnos, known symptoms."""
    found = sorted(dict.fromkeys([*map(_completion_in, text.splitlines()), *error_texts.mlx5_completions(text)]),
                   key=lambda each: each is not None and each[0] == completions.WR_FLUSH_ERR)
    meanings = [of_completion(completions.explain(*each)) for each in found if each is not None]
    meanings += [of_message(words, message) for words, message in error_texts.find(text)]
    meanings += [of_class(name, kind) for name, kind in _CLASSES.items() if re.search(rf"\b{name}\b", text)]
    spelled = {int(number) for match in _ERRNO.findall(text) for number in match if number}
    for words in error_texts.every():
        if (words.number in spelled or words.text.lower() in text.lower() or re.search(rf"\b{words.name}\b", text)):
            meanings.append(of_errno(words))
    lower, is_long = text.lower(), " " in text and len(text) > 8  # a long text may also be part of a symptom
    meanings += [of_check(check) for check in CHECKS if re.search(rf"\b{check.code}\b", text, re.I)
                 or any(each in lower or (is_long and lower in each) for each in map(str.lower, check.symptoms))]
    return meanings[:_MOST_MEANINGS]


def _completion_in(line: str) -> tuple[int, int] | None:
    """Return status and vendor error (0: none) of the failed completion in *line*, None if it has none."""
    vendor, certain, status = _VENDOR.search(line), _OF_COMPLETION.search(line), _STATUS.search(line)
    named = next((number for number, name in completions.NAMES.items() if number and name in line.upper()), None)
    if named is None and certain is not None:
        named = int(certain[1] or certain[2])
    if named is None:
        named = completions.status_in_log_line(line)
    if named is None and status is not None and vendor is not None:
        named = int(status[1])
    return None if named is None else (named, int(vendor[1], 0) if vendor else 0)


def of_check(check: Check) -> Explanation:
    """Return the meaning of a check of the doctor."""
    lines = [("symptom", symptom) for symptom in check.symptoms]
    lines += [("cause", check.cause), ("why", check.why)]
    lines += [(action.where, action.command) for action in check.advice]
    return Explanation(f"{check.code} {check.title}", (*lines, ("seen in", check.seen)))


def of_completion(words: Completion) -> Explanation:
    """Return the meaning of a completion status."""
    vendor = f", vendor error {words.vendor_error} ({words.vendor_error:#x})" if words.vendor_error else ""
    meaning = words.vendor or "not known beside this status; such codes are known only to the card's vendor"
    return Explanation(f"completion status {words.status}{vendor}: {words.name}", (
        ("means", words.happened), *((("vendor", meaning),) if words.vendor or words.vendor_error else ()),
        ("usually", words.usually), ("do", words.advice)))


def of_message(words: str, message: LogMessage) -> Explanation:
    """Return the meaning of a *message* of a tool, of which *words* were found."""
    return Explanation(f'"{words}" ({message.source})', (("means", message.means), ("do", message.advice)))


def of_errno(words: ErrnoMeaning) -> Explanation:
    """Return the meaning of an errno."""
    return Explanation(f"errno {words.number}: {words.name} ({words.text})",
                       (("means", words.means), ("do", words.advice)))


def of_class(name: str, kind: type[BpsError]) -> Explanation:
    """Return the meaning of an error class of bpsfast."""
    code = exit_codes.code_of(kind(""))
    return Explanation(f"bpsfast's error {name}", (("means", " ".join((kind.__doc__ or "").replace("*", "").split())),
                                                   ("exit", f"{code}: {exit_codes.WORDS[code]}")))


def known() -> list[str]:
    """Return every name that `explain` knows."""
    return [*(check.code for check in CHECKS), *(f"IBV_WC_{name}" for name in completions.NAMES.values()),
            *(words.name for words in error_texts.every()), *_CLASSES]


def _near(text: str) -> str:
    upper = {name.upper(): name for name in known()} | {name.upper().removeprefix("IBV_WC_"): name for name in known()}
    near = difflib.get_close_matches(text.upper(), upper, n=1, cutoff=0.6)
    if near:
        return f"did you mean {upper[near[0]]}?"
    return ("it takes RD01 to RD22, a completion's status (12, 12/129, IBV_WC_RETRY_EXC_ERR), an errno (110, "
            "ETIMEDOUT), an error class, `exit 3`, or a pasted line in quotes")
