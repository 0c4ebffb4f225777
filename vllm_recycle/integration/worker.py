"""What our workers share, whatever the device: our runner, our attention, the state file."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from vllm_recycle.core.state_file import StateFileError, shorten
from vllm_recycle.integration.drafter import Drafter
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.base import HOSTED_TRUNK
from vllm_recycle.integration.requests.parameters import check_owner, digest, to_token_ids
from vllm_recycle.integration.start.attention_override import override_backend
from vllm_recycle.integration.state.saved_state import StateSaver

logger = init_logger("vllm.recycle")


class TreeWorker(Worker):
    """What is to be put before the worker of a device, which is one of these in vLLM too."""

    model_runner: Any
    saver: StateSaver | None = None  # of the first rank, once it is warm, with a state file
    has_new_weights = False  # that no step has run with
    runner_class: ClassVar[type]
    replaced_backend: ClassVar[AttentionBackendEnum]  # vLLM's, which ours takes the place of
    tree_backend: ClassVar[type[AttentionBackend]]

    def init_device(self) -> None:
        super().init_device()
        # A worker that names its runner's class in `init_device` has made one of vLLM's. Remove
        # when vLLM 0.31 is dropped, and CPUWorker calls `_make_model_runner` (patches/0004).
        if type(self.model_runner) is not self.runner_class:
            self.model_runner = None  # with what it has on the device
            self.model_runner = self._make_model_runner()

    def _make_model_runner(self) -> Any:
        return self.runner_class(self.vllm_config, self.device)

    @property
    def verifies_trees(self) -> bool:
        """Whether attention must be ours; chains are verified by vLLM's own."""
        return settings_of(self.vllm_config).options.has_trees

    @property
    def tree_drafter(self) -> Drafter:
        return self.model_runner.tree_drafter

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self._load_model(*args, **kwargs)
        # Whoever brings weights from elsewhere calls this in the end, a trainer at once.
        model = self.get_model()
        load_weights = model.load_weights

        def noting_load_weights(*args: Any, **kwargs: Any) -> Any:
            self.weights_changed()
            return load_weights(*args, **kwargs)

        model.load_weights = noting_load_weights

    def _load_model(self, *args: Any, **kwargs: Any) -> None:
        if not self.verifies_trees:
            super().load_model(*args, **kwargs)
            return
        with override_backend(self.replaced_backend, self.tree_backend):
            super().load_model(*args, **kwargs)
        has_host = settings_of(self.vllm_config).options.source == HOSTED_TRUNK
        # Kinds of layers that vLLM serves by a backend derived from ours see other tokens.
        for name, layer in get_layers_from_vllm_config(self.vllm_config, Attention).items():
            sees_no_trees = getattr(layer, "is_draft_layer", False) and has_host
            if layer.attn_backend is not self.tree_backend and not sees_no_trees:
                raise NotImplementedError(
                    f"layer {name}: attention is {layer.attn_backend.__name__}, expected "
                    f"{self.tree_backend.__name__}; start without speculation"
                )

    def compile_or_warm_up_model(self) -> Any:
        times = self.warm_up()
        start_report = self.model_runner.price_rows()  # what it took, and what rows cost if timed
        # Warm-up steps are steps like others: what they taught the proposer is nonsense.
        self.tree_drafter.reset()
        if get_tp_group().rank_in_group == 0:
            self.saver = self.tree_drafter.make_saver()
            logger.info(self.tree_drafter.describe())
            if start_report is not None:
                logger.info("%s: %s", settings_of(self.vllm_config).options.method, start_report)
        return times

    def warm_up(self) -> Any:
        """Compile, capture and warm up as vLLM does."""
        return super().compile_or_warm_up_model()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.weights_changed()
        super().reload_weights(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        self.weights_changed()
        super().update_weights(*args, **kwargs)

    def weights_changed(self) -> None:
        """Let counts of acceptance weigh half as much from the next step on.

        For `collective_rpc`, where weights were changed otherwise than by vLLM or `load_weights`.
        """
        self.has_new_weights = True

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with self._changing_state():
            if self.has_new_weights:
                self.has_new_weights = False
                self.tree_drafter.weights_changed()
            return super().execute_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with self._changing_state():
            return super().sample_tokens(*args, **kwargs)

    def _changing_state(self) -> AbstractContextManager[None]:
        return nullcontext() if self.saver is None else self.saver.changing()

    def save_draft_state(self) -> str | None:
        """Write the matrix or pool file now; for `collective_rpc`. Returns its path on rank 0.

        All data-parallel ranks do, of which vLLM returns the result of the first, here and below.
        """
        return None if self.saver is None else self.saver.save()

    @torch.inference_mode()
    def learn_texts(self, texts: list[str | list[int]]) -> int:
        """Take in what requests may say or be like, for all of them; for `collective_rpc`.

        Args:
            texts: what a prompt may be, a text or its token ids, each; they are nobody's.

        Returns:
            How many tokens that is.

        Raises:
            ValueError: if something is neither, if the method takes in no texts, or under a scope
                in which requests share nothing. Then none was taken in.

        """
        config = self.model_config
        if not isinstance(texts, list):
            raise ValueError(f"learn_texts: got {shorten(texts)}, expected a list of texts")
        tokenizer, vocab_size = cached_tokenizer_from_config(config), config.get_vocab_size()
        read = [
            to_token_ids(text, f"text {number} of learn_texts", tokenizer, vocab_size)
            for number, text in enumerate(texts, start=1)
        ]
        with self._changing_state():
            for token_ids in read:
                self.tree_drafter.take_in(token_ids)
        return sum(map(len, read))

    @torch.inference_mode()
    def forget(self, owners: list[str | int]) -> int:
        """Remove the own entries of some owners; for `collective_rpc`.

        What they wrote for all, without a cache salt, stays.

        Args:
            owners: their names, or the cache salts of requests without an owner.

        Returns:
            How many entries that were. Requests that run go on without them.

        Raises:
            ValueError: if something is no name, or if the method has no owners.

        """
        if not isinstance(owners, list):
            raise ValueError(f"forget: got {shorten(owners)}, expected a list of owners")
        for name in owners:
            if not (isinstance(name, str) and name):  # a salt may be longer than a name
                check_owner(name)
        digests = {digest(name) for name in owners if isinstance(name, str)}
        with self._changing_state():
            return self.tree_drafter.forget({*owners, *digests})

    def draft_statistics(self) -> dict[str, float]:
        """What vLLM's own metrics have no place for; for `collective_rpc`.

        Returns:
            `rounds`, drafts along a trunk or by Ouroboros since the start, and `forwards`, those of
            Ouroboros' draft model, both counted once for each request that took part; else 0.
            `table_fill`, the part of the matrix or pool that is written. `undrafted_requests`, how
            often a request began that gets no drafts by its sampling parameters: an opt-out.
            Where rows are priced one by one, `row_cost`: what a row more costs a step of one at
            least, in units of it; and `seconds_by_measured: ...`: what steps take in parts of what
            they did at start-up.
        """
        return self.tree_drafter.statistics()

    def shutdown(self) -> None:
        try:
            if self.saver is not None:
                self.saver.close()
        except StateFileError as error:
            logger.error("%s; what was learnt since it was last written is lost", error)
        finally:
            super().shutdown()
