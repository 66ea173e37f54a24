"""DeepSpeed's own defaults and learning rates for tests/cli/deepspeed.rs. Needs torch and deepspeed (a CPU will do).

    python deepspeed.py        adds what the installed version says to deepspeed.json; run it once with each version of VERSIONS

Defaults are read from the signatures and constants that DeepSpeed itself uses where a key is left out of its file.
"""

import inspect
import json
import sys
from pathlib import Path

# This file is called like the library.
sys.path = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import constants, lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

VERSIONS = ["0.19.2", "0.19.8"]  # the last that does not clip unless told to, and the newest when this was made
OUT = Path(__file__).with_suffix(".json")


def of(function, *names):
    parameters = inspect.signature(function.__init__).parameters
    return {name: parameters[name].default for name in names}


def defaults():
    adam = of(FusedAdam, "lr", "betas", "eps", "weight_decay")
    assert adam == of(DeepSpeedCPUAdam, *adam)
    fp16 = DeepSpeedFP16Config()
    scaler = ["loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
              "min_loss_scale"]
    warmup = ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"]
    return {
        "gradient_clipping": constants.GRADIENT_CLIPPING_DEFAULT,
        "AdamW": adam,
        "torch_adam": of(torch.optim.AdamW, "lr", "betas", "eps", "weight_decay"),
        "SGD": of(torch.optim.SGD, "lr", "momentum", "weight_decay"),
        "WarmupLR": of(lr_schedules.WarmupLR, *warmup),
        "WarmupDecayLR": of(lr_schedules.WarmupDecayLR, *warmup),
        "WarmupCosineLR": of(lr_schedules.WarmupCosineLR, "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
        "fp16": {key: getattr(fp16, key) for key in scaler},
        "round_robin_gradients": DeepSpeedZeroConfig(stage=2).round_robin_gradients,
    }


def schedule(kind, **params):
    """The learning rate at each value of the scheduler's own counter, from 0 on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=params.get("warmup_max_lr", 0.02))
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    lrs = []
    for _ in range(12):
        scheduler.step()
        lrs.append(scheduler.get_last_lr()[0])
    return {"type": kind, "params": params, "lrs": lrs}


if __name__ == "__main__":
    made = json.loads(OUT.read_text()) if OUT.exists() else {}
    assert deepspeed.__version__ in VERSIONS, deepspeed.__version__
    made[deepspeed.__version__] = {
        "defaults": defaults(),
        "schedules": [
            schedule("WarmupLR", warmup_max_lr=0.013, warmup_num_steps=5),
            schedule("WarmupDecayLR", warmup_max_lr=0.02, warmup_num_steps=4, total_num_steps=12),
            schedule("WarmupCosineLR", warmup_num_steps=4, total_num_steps=12, cos_min_ratio=0.3),
        ],
    }
    OUT.write_text(json.dumps(made, indent=1) + "\n")
