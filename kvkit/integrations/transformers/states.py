"""Define layers of a `KvkitCache` with recurrent states, alone or beside keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvkit.cache.base import NoArray
from kvkit.errors import argument_error
from kvkit.integrations.transformers import recurrent
from kvkit.integrations.transformers.bridge import to_numpy
from kvkit.integrations.transformers.layer import KvkitLayer
from kvkit.interop import numpy_to_tensor


class KvkitStateLayer(NoArray, LinearAttentionCacheLayerMixin):
    """Passes transformers' calls on to a `kvkit.cache.StateLayer`. Its tensors share the layer's memory.

    A step of q tokens calls several methods, and one of them must count the tokens::

        KvkitCache.get_mask_sizes     new_tokens = q
        KvkitCache.get_conv_state     `begin_step` counts q = 1: the model may change the state in place
        update_conv_state             counts q > 1
        update_recurrent_state        counts q if nothing has
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    _an_array = "[*layer.state.states.values()][0]"

    def __init__(self, owner: Any, state_layer: int, number_of_states: int = 1) -> None:
        self._owner, self._state_layer, self.number_of_states = owner, state_layer, number_of_states
        self._is_counted = False  # whether the tokens of this step are counted

    @property
    def state(self) -> Any:
        """Return the layer of kvkit's cache."""
        return self._owner.cache.layers[self._state_layer]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first update decides dtype and shape."""

    # Adding tokens

    def begin_step(self) -> None:
        """Count the token of a step of one token, in which the model may change the state in place."""
        # Models change only a state that exists. While past states are recorded, they call an update instead.
        self._is_counted = self._owner.new_tokens == 1 and bool(self.state.states) and not self.record_past
        if self._is_counted:
            self.state.advance(1)

    def _update(self, name: str, tensor: torch.Tensor, tokens: int) -> torch.Tensor:
        """Store an array of the state; return a tensor over the stored memory."""
        array = to_numpy(name, tensor.contiguous())
        states = self.state.update({name: array}, 0 if self._is_counted else tokens)
        self._is_counted = True
        return numpy_to_tensor(states[name])

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Append the inputs [B, channels, q] of a convolution; return past and new inputs.

        With a kernel of 3 and the state [b c d], new inputs [e f] return [b c d e f] and store [d e f].
        """
        tokens, past = conv_states.shape[-1], self.conv_states[state_idx]
        if past is None:  # zeros stand for the inputs before the first token
            kernel = tokens if conv_kernel_size is None else conv_kernel_size
            inputs = torch.nn.functional.pad(conv_states, (max(0, kernel - tokens), 0))
        else:
            kernel, inputs = past.shape[-1], torch.cat([past, conv_states], dim=-1)
        self._update(f"conv.{state_idx}", inputs[..., -kernel:], tokens)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Store the state after the tokens of the step."""
        return self._update(f"recurrent.{state_idx}", recurrent_states, self._owner.new_tokens)

    # Sizes and positions

    def _tensors(self, kind: str) -> dict[int, torch.Tensor | None]:
        """Return the states of a kind, "conv" or "recurrent", by `state_idx`; None before an update."""
        arrays = {i: self.state.states.get(f"{kind}.{i}") for i in range(self.number_of_states)}
        return {i: None if array is None else numpy_to_tensor(array) for i, array in arrays.items()}

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """Return the last inputs of each convolution, as many as its kernel has."""
        return self._tensors("conv")

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """Return each recurrent state."""
        return self._tensors("recurrent")

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Return, for each state, whether there are past tokens."""
        conv, recurrent = self.conv_states, self.recurrent_states
        return {i: conv[i] is not None or recurrent[i] is not None for i in conv}

    @property
    def record_past(self) -> bool:
        """Return whether the state after every update is kept until the next `crop`."""
        return bool(self.state._record_past)

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value:
            self.state.activate_past_recording()
        elif self.state._record_past:
            self.state._stop_past_recording()

    def activate_past_recording(self) -> None:
        self.state.activate_past_recording()

    def get_max_length(self) -> int:
        return -1  # no limit

    # Removing tokens and changing the batch

    def offload(self) -> None:
        """Do nothing: the cache of kvkit offloads its layers itself."""

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        self.state.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.state.reorder(np.asarray(beam_idx))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch only."""
        self.state.reorder(np.asarray(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self.state.repeat(repeats)

    def reset(self) -> None:
        self.state.reset()


class KvkitDeltaLayer(KvkitStateLayer):
    """Passes transformers' calls on to a `kvkit.cache.GatedDeltaLayer`, which computes rule and convolution.

    The model's functions find this layer by the tensors that it returns, see `recurrent`. A convolution keeps
    K - 1 inputs, one fewer than transformers' own layer. Recorded tokens can be dropped, also some of a step.
    """

    asked: torch.Tensor | None = None  # the state that the model got last
    has_run = False  # whether kvkit has computed this step's rule
    is_recorded = False  # whether it did so for all tokens that a crop may drop

    def __init__(self, owner: Any, state_layer: int) -> None:
        super().__init__(owner, state_layer)
        if owner.config is not None:
            recurrent.wrap_functions(owner.config)

    def begin_step(self) -> None:
        self._is_counted = self._owner.new_tokens == 1 and bool(self.state.states)
        if self._is_counted:
            self.state.advance(1)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        inputs = to_numpy("conv_states", conv_states)
        window = numpy_to_tensor(self.state.add_inputs(inputs, 0 if self._is_counted else inputs.shape[2]))
        self._is_counted = True
        recurrent.WINDOW.set(weakref.ref(window))
        return window

    def ask(self) -> torch.Tensor | None:
        """Return the recurrent state of a step; the rule finds this layer by it."""
        self.asked, self.has_run = self.recurrent_states[0], False
        recurrent.ASKED.set(self)
        return self.asked

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        recurrent.ASKED.set(None)
        if not self.has_run:  # the model's own function has computed it
            array = to_numpy("recurrent_states", recurrent_states.float().contiguous())
            self.state.update({"recurrent": array}, 0 if self._is_counted else self._owner.new_tokens)
        self.is_recorded, self.asked = self.has_run, None
        self._is_counted = True
        states = self.recurrent_states[0]
        return recurrent_states if states is None else states

    def _tensors(self, kind: str) -> dict[int, torch.Tensor | None]:
        array = self.state.states.get(kind)
        return {0: None if array is None else numpy_to_tensor(array)}

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Return whether `crop` can drop recorded tokens one by one."""
        return self.is_recorded and self.record_past


def change_both(name: str) -> Callable[..., None]:
    """Return a method that calls the method `name` for the keys and values, then for the state."""

    def change(self: KvkitHybridLayer, *arguments: Any) -> None:
        getattr(KvkitLayer, name)(self, *arguments)
        getattr(KvkitStateLayer, name)(self, *arguments)

    return change


class KvkitHybridLayer(KvkitStateLayer, KvkitLayer):
    """A layer with keys and values, whose recurrent state is in another layer of kvkit's cache.

    `layer` is the one with keys and values, `state` the other.
    """

    def __init__(self, owner: Any, layer_idx: int, state_layer: int, number_of_states: int = 1) -> None:
        KvkitLayer.__init__(self, owner, layer_idx)
        KvkitStateLayer.__init__(self, owner, state_layer, number_of_states)

    def get_max_length(self) -> int:
        return KvkitLayer.get_max_length(self)

    def crop(self, tokens_to_remove: int) -> None:
        self.state._length_after_crop(tokens_to_remove)  # raises before keys and values are cropped
        KvkitLayer.crop(self, tokens_to_remove)
        KvkitStateLayer.crop(self, tokens_to_remove)

    reorder_cache = change_both("reorder_cache")
    batch_select_indices = change_both("batch_select_indices")
    batch_repeat_interleave = change_both("batch_repeat_interleave")
    reset = change_both("reset")
    activate_past_recording = change_both("activate_past_recording")


def check_state(layer: Any, layer_idx: int) -> KvkitStateLayer:
    """Return a layer; raise unless it has a recurrent state."""
    if not isinstance(layer, KvkitStateLayer):
        raise argument_error("layer_idx", "a layer with a recurrent state", layer_idx)
    return layer
