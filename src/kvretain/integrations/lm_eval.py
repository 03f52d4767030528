"""lm-evaluation-harness with a budget: its generation tasks, through a :class:`~kvretain.RetentionCache`.

The harness knows its models from a table of its own and looks for no others when its command starts (release 0.4.13: no
entry points, and ``--include_path`` finds tasks only). So this module is its command, with one model more::

    python -m kvretain.integrations.lm_eval --model kvretain \\
        --model_args pretrained=Qwen/Qwen3-0.6B,policy=alpha,budget=128 --tasks gsm8k --apply_chat_template

In Python, importing this module registers the model: ``lm_eval.simple_evaluate(model="kvretain", model_args=...)``.

``model_args`` are those of the harness's ``hf`` model and of :meth:`kvretain.RetentionCache.for_model`: ``policy`` with
``budget`` or ``ratio``, ``every``, ``sinks``, ``recent``, ``protect_prompt``, ``trigger``, and ``scope`` for a policy
that names none. ``pretrained`` may also be a model that ships with packages, such as ``smollm2-135m``. What the caches
held comes into the results under ``config``, ``kvretain``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from ..cache.budget import Budget
from ..cache.support import keyword
from ..models import PACKAGED, load_model
from ..policy import Policy

try:
    from lm_eval.api.registry import model_registry
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    _reason = f'kvretain.integrations.lm_eval needs lm-evaluation-harness: pip install "kvretain[lm-eval]" ({error})'
    raise (SystemExit(f"error: {_reason}") if __name__ == "__main__" else ImportError(_reason)) from error

NAME = "kvretain"
"""The model's name in the harness."""

REASON = (
    "a bounded cache evicts while a model generates, and scoring a given continuation in one pass would never evict, "
    "so a log-likelihood would be that of the full cache: choose generation tasks, or --model hf for the full cache"
)

# By name, so that running this module as a command, which imports it twice, registers one class.
model_registry.register(NAME, target="kvretain.integrations.lm_eval:RetentionLM")


@dataclasses.dataclass(frozen=True)
class Options:
    """Those of ``model_args`` that are ours, see :meth:`kvretain.RetentionCache.for_model`.

    Attributes:
        policy: a preset or policy text, required.
        scope: for a policy that names none.

    Raises:
        ValueError: no policy, an unknown one, or what :class:`~kvretain.cache.budget.Budget` refuses.
    """

    policy: str = ""
    budget: int | None = None
    ratio: float | None = None
    every: int = 128
    sinks: int | None = None
    recent: int | None = None
    protect_prompt: bool = False
    trigger: str = "slack"
    scope: str | None = None

    def __post_init__(self) -> None:
        if not self.policy:
            raise ValueError("model_args names no policy: add policy=alpha,budget=128 (see `kvretain policies`)")
        if self.scope is not None and "@" in self.policy:
            raise ValueError(f"the policy {self.policy!r} names its scope: leave out scope={self.scope}")
        if self.resolved.scorer is not None:
            Budget(tokens=self.budget, **self._limits)

    @classmethod
    def of(cls, model_args: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Our options and the others."""
        names = {field.name for field in dataclasses.fields(cls)}
        return (
            cls(**{name: value for name, value in model_args.items() if name in names}),
            {name: value for name, value in model_args.items() if name not in names},
        )

    @property
    def resolved(self) -> Policy:
        """The policy, at :attr:`scope`."""
        policy = Policy.parse(self.policy)
        return policy if self.scope is None else dataclasses.replace(policy, scope=self.scope)

    @property
    def _limits(self) -> dict[str, Any]:
        names = ("ratio", "every", "sinks", "recent", "protect_prompt", "trigger")
        return {name: getattr(self, name) for name in names}

    def new_cache(self, model: Any) -> Any:
        """An empty cache for ``model``."""
        from ..cache import RetentionCache

        return RetentionCache.for_model(model, self.resolved, budget=self.budget, **self._limits)


@dataclasses.dataclass
class Held:
    """What the caches of a run held, over all batches.

    Attributes:
        batches, passes, evictions: how many.
        total: entries per KV head after each pass, summed over passes.
        peak_cache: the most of these; ``peak_bytes``: the most bytes of keys and values of a batch.
    """

    batches: int = 0
    passes: int = 0
    evictions: int = 0
    total: float = 0.0
    peak_cache: float = 0.0
    peak_bytes: int = 0

    def add(self, trace: Any) -> None:
        """Counts one batch's :class:`~kvretain.Trace`."""
        self.batches += 1
        self.passes += len(trace)
        self.evictions += trace.evictions
        self.total += trace.mean_length * len(trace)
        self.peak_cache = max(self.peak_cache, trace.peak_length)
        self.peak_bytes = max(self.peak_bytes, trace.peak_nbytes)

    def to_dict(self) -> dict[str, float]:
        """For the results; ``mean_cache`` is over all passes."""
        made = dataclasses.asdict(self)
        return made | {"mean_cache": made.pop("total") / self.passes if self.passes else 0.0}


class RetentionLM(HFLM):
    """The harness's ``hf`` model, generating through a new :class:`~kvretain.RetentionCache` for each batch.

    Prompts, chat templates, left padding, stop sequences and sampling are the harness's own. A row of a batch gets its
    solo reply if both evict at the same passes, as they do once every prompt is longer than the budget.

    Args:
        pretrained: as for ``hf``, or a name of :data:`kvretain.models.PACKAGED`.
        model_args: the fields of :class:`Options`, and what ``hf`` takes.

    Raises:
        ValueError: what :class:`Options` refuses, before the model is loaded; or a model that the cache cannot serve.
    """

    def __init__(self, pretrained: Any, **model_args: Any) -> None:
        self.options, rest = Options.of(model_args)
        if isinstance(pretrained, str) and pretrained in PACKAGED:
            dtype = rest.get("dtype")
            pretrained, rest["tokenizer"] = load_model(
                pretrained, dtype=None if dtype == "auto" else dtype, device=rest.get("device")
            )
        super().__init__(pretrained, **rest)
        self.held = Held()
        self.options.new_cache(self.model)  # refuses what it cannot serve before the first task

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        cache = self.options.new_cache(self.model)
        given = keyword(self.model, cache)
        made = super()._model_generate(context, max_length, stop, **given, **generation_kwargs)
        self.held.add(cache.trace)
        return made

    def get_model_info(self) -> dict[str, Any]:
        """What the results tell of the model, the policy and the caches."""
        from .. import __version__

        given = dataclasses.asdict(self.options) | {"policy": str(self.options.resolved), "version": __version__}
        return {**super().get_model_info(), "kvretain": given | self.held.to_dict()}

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
        """Refused: see :data:`REASON`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(REASON)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
        """Refused: see :data:`REASON`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(REASON)


def check_tasks(tasks: Mapping[str, Any]) -> None:
    """Refuses tasks that need log-likelihoods, before any model is loaded.

    Args:
        tasks: the harness's tasks by name, such as ``TaskManager().load([...])["tasks"]``.

    Raises:
        ValueError: names them and says why.
    """
    refused = [name for name, task in tasks.items() if task.OUTPUT_TYPE not in ("generate_until", None)]
    if refused:
        raise ValueError(f"{', '.join(refused)} cannot be run with --model {NAME}: {REASON}")


def main() -> None:
    """The harness's command; tasks and ``model_args`` of our model are checked before anything is loaded."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    setup_logging()
    command = HarnessCLI()
    arguments = command.parse_args()
    if arguments.command == "run":
        config = EvaluatorConfig.from_cli(arguments)
        if config.model == NAME:
            try:
                Options.of({name: value for name, value in config.model_args.items() if name != "pretrained"})
                check_tasks(config.process_tasks(config.metadata).load(config.tasks)["tasks"])
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                raise SystemExit(2) from None
    command.execute(arguments)


if __name__ == "__main__":
    main()
