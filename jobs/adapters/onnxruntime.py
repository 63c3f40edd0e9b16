"""onnxruntime as an engine: the same graph and weights file, any provider, a plugin's included, and our greedy loop.

The prompt goes in at once; keys and values stay where the session leaves them and are bound back as they grow; logits
come to the host, as the graph chooses nothing. A plugin's provider that takes no node leaves a session that names it
and runs on the CPU without a word: here it is asked which nodes it took, and where it took none it cannot load.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import CannotLoad, UnsupportedModel
from engine.model_config import graph_path, read_configs
from engine.onnx_load import load
from jobs.adapters.peer import Asked, Logits, Made, Option, Peer, Scalar, checked_best, library, main

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
INSTALL = "pip install onnxruntime, or onnxruntime-gpu for its own CUDA provider"
_ELEMENTS = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
LEAST = "get_provider_graph_assignment_info"
"""What a session must be able to tell: which provider has which node."""


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider by its name, with what a plugin offers it as; None for one that is built in."""

    name: str
    offered: Any = None


def provider_for(ort: Any, name: str | None, plugin: str | None) -> Provider:
    """The provider of that name, or the first of a plugin, registered here. Raises CannotLoad where there is none."""
    if plugin is None:
        name = name or CUDA
        if name not in (there := ort.get_available_providers()):
            raise CannotLoad(f"onnxruntime {ort.__version__} has {', '.join(there)}, not {name}", INSTALL)
        return Provider(name)
    module = library(plugin, f"pip install the wheel that holds {plugin}")
    before = {device.ep_name for device in ort.get_ep_devices()}
    ort.register_execution_provider_library(module.REGISTRATION_NAME, module.get_library_path())
    offered = [device for device in ort.get_ep_devices() if device.ep_name not in before]
    found = next((device for device in offered if name in (None, device.ep_name)), None)
    if found is None:
        names = ", ".join(device.ep_name for device in offered) or "nothing"
        raise CannotLoad(f"{plugin} offers {names}, not {name or 'a device'}", "see what its wheel needs on this host")
    return Provider(found.ep_name, found)


class OrtDecoder:
    """A session of a model folder on one provider. Raises whatever onnxruntime does.

    `kv`: "provider" leaves keys and values on the device where the session does, "host" brings them to the host each
    step. `profile`: where to write onnxruntime's own profile.
    """

    def __init__(
        self, ort: Any, model: Path, provider: Provider, kv: str, profile: Path | None = None, threads: int = 0
    ) -> None:
        info = load(model).info
        if info.states:
            raise UnsupportedModel.because("onnxruntime's loop here", ("the graph keeps states beside its cache",))
        self.ort, self.info, self.provider = ort, info, provider
        self.session = self._session(model, profile, threads)
        self.presents = {
            made: past
            for cache in info.caches
            for made, past in ((cache.present_key, cache.past_key), (cache.present_value, cache.past_value))
        }
        inputs = {i.name: i.type for i in self.session.get_inputs()}
        element = _ELEMENTS.get(inputs[info.caches[0].past_key])
        if element is None:
            raise UnsupportedModel.because(
                "onnxruntime's loop here", (f"its cache holds {inputs[info.caches[0].past_key]}",)
            )
        self.empty = np.zeros((1, info.kv_heads, 0, info.head_size), element)
        places = zip(self.session.get_outputs(), self.session.get_output_memory_infos(), strict=True)
        self.places = {o.name: "cpu" if kv == "host" or told.name == "Cpu" else "cuda" for o, told in places}
        self.kv_found_on: list[str] = []
        self.settings: Mapping[str, Scalar] = {"onnxruntime.provider": provider.name}

    @property
    def on(self) -> str:
        """The kind of device that computes."""
        return "cpu" if self.provider.name == CPU else "cuda"

    @property
    def facts(self) -> Mapping[str, int | float | str]:
        """Which provider has how many of the graph's nodes, and where keys and values were found."""
        given = "; ".join(f"{name} {sum(ops.values())}" for name, ops in sorted(self.assigned().items()))
        return {"nodes_by_provider": given, "kv_on": ", ".join(self.kv_found_on)}

    def assigned(self) -> dict[str, dict[str, int]]:
        """Nodes of the graph given to each provider when the session was made, by operator."""
        given: dict[str, Counter[str]] = {}
        for part in self.session.get_provider_graph_assignment_info():
            given.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
        return {name: dict(ops.most_common()) for name, ops in given.items()}

    def generate(self, prompt: Sequence[int], tokens: int, *, ignore_eos: bool = True) -> Made:
        """One generation, by the host's clock: a step ends with its id."""
        binding, pasts = self.session.io_binding(), self._no_pasts()
        ends = () if ignore_eos else self.info.eos_ids
        ids: list[int] = []
        times: list[int] = []
        read = prompt
        while len(ids) < tokens and not (ids and ids[-1] in ends):
            start = time.perf_counter_ns()
            ids.append(checked_best(self._step(binding, read, len(prompt) + len(ids), pasts)))
            times.append(time.perf_counter_ns() - start)
            read = ids[-1:]
        self.kv_found_on = sorted({value.device_name() for value in pasts.values()})
        return Made(ids, times[0], times[1:], ids[-1] in ends)

    def logits(self, prompt: Sequence[int], forced: Sequence[int]) -> Logits:
        """Logits after the prompt and after each forced id."""
        binding, pasts = self.session.io_binding(), self._no_pasts()
        rows = [self._step(binding, prompt, len(prompt), pasts)]
        rows += [self._step(binding, [token], len(prompt) + n, pasts) for n, token in enumerate(forced, start=1)]
        return np.stack(rows).astype(np.float32)

    def _session(self, model: Path, profile: Path | None, threads: int) -> Any:
        options = self.ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        built_in = None if self.provider.offered is not None else [self.provider.name]
        if self.provider.offered is not None:
            options.add_provider_for_devices([self.provider.offered], {})
        return self.ort.InferenceSession(str(graph_path(model, read_configs(model))), options, providers=built_in)

    def _no_pasts(self) -> dict[str, Any]:
        return {name: self.ort.OrtValue.ortvalue_from_numpy(self.empty) for name in self.presents.values()}

    def _step(self, binding: Any, read: Sequence[int], total: int, pasts: dict[str, Any]) -> Logits:
        """Feed `read`, which ends at position `total`; its last logits. `pasts` become what the step made of them."""
        info = self.info
        binding.bind_cpu_input(info.input_ids, np.array([read], np.int64))
        if info.attention_mask:
            binding.bind_cpu_input(info.attention_mask, np.ones((1, total), np.int64))
        if info.position_ids:
            binding.bind_cpu_input(info.position_ids, np.arange(total - len(read), total, dtype=np.int64)[None])
        for name, value in pasts.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(info.logits, "cpu")
        for name in self.presents:
            binding.bind_output(name, self.places[name])
        self.session.run_with_iobinding(binding)
        logits, *made = binding.get_outputs()
        pasts.update(zip(self.presents.values(), made, strict=True))
        row: Logits = logits.numpy()[0, -1].astype(np.float32)
        return row


def opened(asked: Asked) -> OrtDecoder:
    """The session that an arm asks for. Raises CannotLoad where the provider is not there or took no node."""
    ort = library("onnxruntime", INSTALL)
    if not hasattr(ort.InferenceSession, LEAST):
        raise CannotLoad(f"onnxruntime {ort.__version__} does not tell which provider has which node", INSTALL)
    plugin, wanted = asked.options["plugin"], asked.options["provider"]
    name = wanted or (None if plugin or asked.on_card else CPU)
    provider = provider_for(ort, name, plugin)
    decoder = OrtDecoder(ort, asked.request.model, provider, asked.options["kv"], threads=asked.options["threads"])
    if provider.name not in decoder.assigned():
        elsewhere = decoder.facts["nodes_by_provider"]
        remedy = f"name the provider that runs it, provider: {CPU}, or mend the plugin's set-up"
        raise CannotLoad(f"{provider.name} took no node of the graph ({elsewhere})", remedy)
    return decoder


PEER = Peer(
    name="onnxruntime",
    module="jobs.adapters.onnxruntime",
    open=opened,
    distributions=("onnxruntime",),
    blind="onnxruntime does not tell what its providers copy, allocate or launch",
    options={
        "provider": Option(None, "execution provider by name; without one its CUDA provider, and on no card the CPU's"),
        "plugin": Option(None, "module of a plugin's wheel, such as nxrt_ep_cuda"),
        "kv": Option("provider", "where keys and values are kept between steps", ("provider", "host")),
        "threads": Option(0, "threads of an operator on the CPU; 0: as many as onnxruntime takes"),
    },
)

if __name__ == "__main__":
    sys.exit(main(PEER))
