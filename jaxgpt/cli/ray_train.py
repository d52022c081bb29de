"""`jaxgpt train --on ray`: the same command on each of several hosts of a Ray cluster, as one training."""

import os
import sys

from jaxgpt.errors import UserError, first_line


def train_on_ray(address: str | None, hosts: int, cpus: float, gpus: int, tpu_slice: str | None) -> None:
    """Repeat this process's `jaxgpt train` on each host, in this folder, which all of them see. Raises `UserError`.

    cpus, gpus: of each host. tpu_slice: TPU-V6E:4x4, for example, whose hosts they are.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # with it, what a worker says comes twice
    try:
        import ray
        from ray.train.v2.api.config import RunConfig, ScalingConfig
        from ray.train.v2.jax import JaxConfig, JaxTrainer
    except ImportError:
        raise UserError("--on ray needs Ray: python -m pip install 'jaxgpt[ray]'") from None

    folder, words = os.getcwd(), sys.argv[1:] if sys.argv[1:2] == ["train"] else ["train", *sys.argv]

    def repeat() -> None:
        from jaxgpt.cli.main import main

        os.chdir(folder)
        main([*words, "--on", "None"])

    if tpu_slice:
        kind, _, topology = tpu_slice.partition(":")
        workers = ScalingConfig(num_workers=hosts, use_tpu=True, accelerator_type=kind, topology=topology)
    else:
        each = {"CPU": cpus, "GPU": gpus}
        workers = ScalingConfig(num_workers=hosts, use_gpu=gpus > 0, resources_per_worker=each)
        workers.placement_strategy = "SPREAD"
    meet = JaxConfig(use_tpu=bool(tpu_slice), use_gpu=not tpu_slice)  # which goes by the platform's name, a CPU's too
    platform = {} if gpus or tpu_slice else {"JAX_PLATFORMS": "cpu"}
    how = RunConfig(storage_path="/tmp/ray", worker_runtime_env={"env_vars": platform})
    try:
        ray.init(address)
        JaxTrainer(repeat, jax_config=meet, scaling_config=workers, run_config=how).fit()
    except Exception as e:
        raise UserError(f"training on Ray failed: {first_line(e)}") from e
