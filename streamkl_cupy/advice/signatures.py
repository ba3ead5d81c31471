"""Calls that do not fit a function's signature, answered with what is probably meant.

People come from functions that spell the same things otherwise. Python's own text names what it does not know; ours
names the option that does it, and how the value is converted.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from ..frameworks import compiling
from ..ops import ATTENTION_KL, ATTENTION_KL_TO, INDEXER_KL, INDEXER_TARGET, SPARSE_ATTENTION, Op
from ..options import SHARED, TABLES

_F = TypeVar("_F", bound=Callable[..., Any])

_MASKS = (
    "say which keys a batch entry has by key_mask, (B, N) bool, True where there is a key, and which rows by "
    "query_mask, (B, M); masks by row and key are causal, "
    "window, cu_seqlens_q and cu_seqlens_k, and block_mask (streamkl_cupy.patterns.from_dense). Nothing is added to "
    "logits"
)
_SCALES = "each side has its own: teacher_scale and student_scale, by default 1 / sqrt(D)"
_TEMPERATURE = (
    "divide both scales by it: teacher_scale=1 / (T * D_t**0.5), student_scale=1 / (T * D_s**0.5); and multiply the "
    "loss by T**2 where gradients are to keep their size"
)
_LENGTHS = "say key_lengths, (B,) int32, and query_lengths where query rows are padded too"
_NO_DROPOUT = "leave it out: the distributions are compared as they are, without dropout"
_WEIGHT = "say row_weight, an array that broadcasts to the rows: 0 where a row does not count"
_INPUTS = "the arrays are teacher_q, teacher_k, student_q and student_k"
_NO_LENGTH = "leave it out: it is not needed"
_LSE = "say return_lse=True"
_LAYOUT = 'say layout="bnhd" for (B, N, H, D) arrays; "bhnd", (B, H, N, D), is the default'
_CAUSAL = (
    "say causal=True. It is aligned to the last key; torch's is_causal is aligned to the first, which with M != N is "
    "causal=True, q_offset=0"
)

# What other libraries call it -> what to say here.
_MEANT = {
    "is_causal": _CAUSAL,
    "use_causal_mask": _CAUSAL,
    "causal_mask": _CAUSAL,
    "mask": _MASKS,
    "attn_mask": _MASKS,
    "attention_mask": _MASKS,
    "attn_bias": _MASKS,
    "bias": _MASKS,
    "key_padding_mask": (
        "it is True where there is padding: say key_mask=~key_padding_mask, and query_mask the same where the rows are "
        "those of the keys"
    ),
    "src_key_padding_mask": (
        "it is True where there is padding: say key_mask=~src_key_padding_mask, and query_mask the same where the rows "
        "are those of the keys"
    ),
    "padding_mask": "say key_mask, (B, N) bool, True where there is a key, and query_mask, (B, M), for query rows",
    "scale": _SCALES,
    "softmax_scale": _SCALES,
    "sm_scale": _SCALES,
    "scaling": _SCALES,
    "temperature": _TEMPERATURE,
    "T": _TEMPERATURE,
    "tau": _TEMPERATURE,
    "window_size": "say window=(left, right); -1 is no limit",
    "local_window_size": "say window=(left, right); one number w is window=(w, w)",
    "sliding_window": "it counts the row's own key: say causal=True, window=(sliding_window - 1, 0)",
    "query_seq_lengths": "say query_lengths, (B,) int32; or pack the sequences with cu_seqlens_q and cu_seqlens_k",
    "seqused_q": "say query_lengths, (B,) int32",
    "q_lengths": "say query_lengths, (B,) int32",
    "key_value_seq_lengths": _LENGTHS,
    "seqused_k": _LENGTHS,
    "cache_seqlens": _LENGTHS,
    "seq_lens": _LENGTHS,
    "lengths": _LENGTHS,
    "kv_lengths": _LENGTHS,
    "cu_seqlens": "say cu_seqlens_q and cu_seqlens_k; one array may be given for both",
    "cu_seqlens_kv": "say cu_seqlens_k",
    "max_seqlen": _NO_LENGTH,
    "max_seqlen_q": _NO_LENGTH,
    "max_seqlen_k": _NO_LENGTH,
    "max_seqlen_kv": _NO_LENGTH,
    "dropout_p": _NO_DROPOUT,
    "dropout": _NO_DROPOUT,
    "dropout_rate": _NO_DROPOUT,
    "enable_gqa": "leave it out: grouped heads are told by the shapes, H_k divides H",
    "softcap": "each side has its own: teacher_softcap and student_softcap",
    "score_mod": f"functions of the logits are not built; {_MASKS}",
    "alibi_slopes": "biases of the logits are not built",
    "query": _INPUTS,
    "key": _INPUTS,
    "q": _INPUTS,
    "k": _INPUTS,
    "v": f"values have no part in it; {_INPUTS}",
    "value": f"values have no part in it; {_INPUTS}",
    "teacher": _INPUTS,
    "student": _INPUTS,
    "weight": _WEIGHT,
    "weights": _WEIGHT,
    "loss_mask": _WEIGHT,
    "size_average": 'say reduction="mean" or "sum"',
    "return_softmax_lse": _LSE,
    "return_logsumexp": _LSE,
    "qkv_format": _LAYOUT,
    "tensor_layout": _LAYOUT,
    "batch_first": _LAYOUT,
}
_OF_MAPS = (
    "It takes the queries and keys of both sides, not attention maps: of two maps p and q the KL is "
    "(p * (log(p) - log(q))).sum(-1)"
)


class _Words(NamedTuple):
    """What answers say of one operation."""

    few: str
    """To too few arrays."""
    grad: str
    """Where the first of them is a gradient."""
    array: str
    """To one array too many."""
    meant: dict[str, str]
    """What other libraries call it, where that is something else than for other operations."""


_ATTENTION_INPUTS = "the arrays are query, key and value"
_ATTENTION_TEMPERATURE = "divide the scale by it: scale=1 / (T * D**0.5)"
_ATTENTION_WEIGHT = "leave it out: outputs are not reduced"
_INDEXER_MEANT = {
    **dict.fromkeys(("scale", "softmax_scale", "sm_scale", "scaling"), "say index_scale, and teacher_scale"),
    **dict.fromkeys(
        ("q", "k", "query", "key", "teacher", "student"), "the arrays are teacher_q, teacher_k, index_q, index_k"
    ),
    **dict.fromkeys(("weights", "index_w"), "say index_weights; of rows, row_weight"),
    **dict.fromkeys(("topk", "indices"), "say topk_indices, (B, M, K), and topk_length where some of them count"),
    **dict.fromkeys(("return_lse", "return_softmax_lse", "return_logsumexp"), "say return_stats=True"),
    "lse": "say teacher_lse",
}
_WORDS: Final = {
    ATTENTION_KL.name: _Words(
        _OF_MAPS,
        "grad, the derivative of the loss by each row's KL, comes first",
        "Values have no part in it, and masks are named: key_mask, key_lengths, row_weight",
        {},
    ),
    ATTENTION_KL_TO.name: _Words(
        "It takes the target, and the student's queries and keys",
        "",
        "Values have no part in it, and masks are named: key_mask, key_lengths, row_weight",
        {},
    ),
    SPARSE_ATTENTION.name: _Words(
        "It takes queries, keys and values, with heads of their own each, and not packed into one array",
        "grad, the derivative of the loss by the outputs, comes first",
        "Masks are named: key_mask, key_lengths, block_mask",
        {
            **dict.fromkeys(("temperature", "T", "tau"), _ATTENTION_TEMPERATURE),
            **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), "say scale, by default 1 / sqrt(D)"),
            **dict.fromkeys(
                ("q", "k", "v", "queries", "keys", "values", "teacher", "student", "teacher_q", "student_q"),
                _ATTENTION_INPUTS,
            ),
            **dict.fromkeys(("dropout_p", "dropout", "dropout_rate"), "leave it out: dropout of weights is not built"),
            **dict.fromkeys(("row_weight", "weight", "weights", "loss_mask", "reduction"), _ATTENTION_WEIGHT),
            "logits_soft_cap": "say softcap",
            "sinks": (
                "a logit beside the keys is a part of them without values: merge_attention_states([out, zeros], "
                "[lse, sink]) of the outputs and log-sum-exps"
            ),
            "s_aux": "it is a part of the keys without values: merge_attention_states([out, zeros], [lse, s_aux])",
            "page_table": "caches in pages are not built: gather the pages into one array",
            "block_table": "caches in pages are not built: gather the pages into one array",
        },
    ),
    INDEXER_KL.name: _Words(
        "It takes the teacher's queries and keys, then the indexer's",
        "grad, the derivative of the loss by each row's KL, comes first",
        "All other arrays are named: teacher_lse, key_mask, topk_indices",
        _INDEXER_MEANT,
    ),
    INDEXER_TARGET.name: _Words(
        "It takes the teacher's queries and keys",
        "",
        "All other arrays are named: teacher_lse, key_mask, topk_indices",
        _INDEXER_MEANT,
    ),
}

# Every answered function by its options.
_functions: dict[str, frozenset[str]] = {}


def public(
    run: Callable[..., Any],
    too_many: str | None = None,
    outside_programs: Callable[..., Any] | None = None,
    op: Op = ATTENTION_KL,
) -> Callable[[_F], _F]:
    """Decorate a signature and its documentation to be the function of an operation that people call.

    `run(arrays, options, **own)` does the work: the arrays in their order, those options of the table that were given,
    by name, and all that are this function's alone. Wrong keywords and numbers of arrays are answered by name.
    `too_many` is what to say about more positional arguments than there are. Plain enough for torch.compile to trace.
    `outside_programs` is what keeps that out: a function that computes on memory by its address is neither to be
    translated nor to be run on stand-ins.
    """

    shared = SHARED[op.name]

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        placed = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        arrays = tuple(p.name for p in placed)
        needed = tuple(p.name for p in placed if p.default is p.empty)
        own = {
            p.name: p.default
            for p in signature.parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in shared
        }
        count, known, name = len(arrays), frozenset(signature.parameters), function.__name__

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for option in options:
                if option not in known:
                    raise TypeError(_unknown(op, name, option, known))
            if len(args) != count:
                if len(args) > count:
                    raise TypeError(_too_many(op, name, args, arrays, too_many))
                for argument in needed[len(args) :]:
                    if argument not in options:
                        missing = [x for x in needed[len(args) :] if x not in options]
                        raise TypeError(_too_few(op, name, needed, missing))
                args = (*args, *[options.pop(x.name, x.default) for x in placed[len(args) :]])
            alone = own | {option: options.pop(option) for option in own.keys() & options.keys()} if options else own
            for option in options:
                if option not in shared:
                    raise TypeError(f"{name}() got multiple values for argument {option!r}")
            if outside_programs is not None and compiling():
                return outside_programs(run, args, options, **alone)
            return run(args, options, **alone)

        call.__signature__ = _Readable(  # type: ignore[attr-defined]
            list(signature.parameters.values()), return_annotation=signature.return_annotation
        )
        _functions.setdefault(name, known)
        return call  # type: ignore[return-value]

    return decorate


def documented_by(texts: Mapping[str, str]) -> Callable[[_F], _F]:
    """Decorate documentation to have these texts in the places of their names, in angle brackets."""

    def decorate(function: _F) -> _F:
        for key, text in texts.items():
            function.__doc__ = (function.__doc__ or "").replace(f"<{key}>", text)
        return function

    return decorate


class _Readable(inspect.Signature):
    """A signature that `help` prints with one parameter a line, and annotations without quotes."""

    def __str__(self) -> str:
        return self.format()

    def format(self, **_how: Any) -> str:
        lines, named = [], False
        for p in self.parameters.values():
            if p.kind is p.KEYWORD_ONLY and not named:
                lines.append("*")
                named = True
            annotation = "" if p.annotation is p.empty else f": {_text(p.annotation)}"
            default = "" if p.default is p.empty else f" = {p.default!r}"
            lines.append(f"{p.name}{annotation}{default}")
        result = "" if self.return_annotation is self.empty else f" -> {_text(self.return_annotation)}"
        return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){result}"


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _unknown(op: Op, function: str, option: str, known: Iterable[str]) -> str:
    begin = f"{function}() has no option {option!r}: "
    meant = {**_MEANT, **_WORDS[op.name].meant}
    if option in meant:
        return begin + meant[option]
    others = [name for name, options in _functions.items() if option in options]
    if others:
        return f"{begin}it is one of {', '.join(others)}"
    near = difflib.get_close_matches(option, known, 1)
    return begin + (f"is {near[0]} meant?" if near else f"there are {', '.join(sorted(known))}")


def _too_many(op: Op, function: str, args: tuple[Any, ...], names: tuple[str, ...], special: str | None) -> str:
    if special is None:
        extra = args[len(names)]
        if isinstance(extra, bool):
            special = f"Options are named: is causal={extra} meant?"
        elif isinstance(extra, (int, float)):
            scales = ", ".join(f"{name}={extra}" for name in TABLES[op.name] if name.endswith("scale"))
            special = f"Options are named: {scales}, q_offset={extra}?"
        elif hasattr(extra, "shape"):
            special = _WORDS[op.name].array
        else:
            special = "Options are named"
    return f"{function}() takes {len(names)} arguments by position, {', '.join(names)}, but {len(args)} came. {special}"


def _too_few(op: Op, function: str, needed: tuple[str, ...], missing: list[str]) -> str:
    came = len(needed) - len(missing)
    words = _WORDS[op.name]
    hint = words.grad if needed[0] == "grad" else words.few
    return f"{function}() needs {', '.join(needed)}, but {came} came: {', '.join(missing)} missing. {hint}"
