"""CosmoFlow: four cosmological parameters from a 3-D matter distribution.

Specification: MLPerf HPC v1.0 and later (mlcommons/hpc, ``cosmoflow/models/cosmoflow.py``, ``configs/cosmo.yaml``,
``data/cosmo.py``). With ``kernel_size=2`` it is the network of the v0.7 round, whose logs report 5,597,604 parameters.
"""

from __future__ import annotations

from typing import Any, List, Mapping, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_mlhpc.node.worker.base import Task, TensorSpec, channels_first, laid_out
from pytest_mlhpc.node.worker.workloads.optimizers import optimizer_of
from pytest_mlhpc.node.worker.workloads.trainings import cosmoflow_conflicts, require

CHANNELS = 4  #: redshifts of a sample
TARGETS = 4  #: Omega_m, sigma_8, n_s, H_0, each scaled to [-1, 1]
SLOPE = 0.3  #: of every leaky ReLU
REACH = 1.2  #: the output is this times tanh, so that targets at the edge can be reached


class CosmoFlow(nn.Module):
    """Convolutions that halve the edge and double the filters, then three dense layers.

    Takes (N, 4, size, size, size), returns (N, 4) in [-1.2, 1.2].
    """

    def __init__(
        self, *, kernel_size: int, input_size: int, layers: int, base_channels: int, dropout: float
    ) -> None:
        super().__init__()
        blocks: List[nn.Module] = []
        channels, size = CHANNELS, input_size
        # Keras's "same": an even kernel gets its odd voxel of padding at the far end. The parameter count of the v0.7
        # logs (4 voxels along the edge are left of 128) shows that this is what ran.
        before, after = (kernel_size - 1) // 2, kernel_size // 2
        for layer in range(layers):
            filters = base_channels * 2**layer
            if before == after:
                blocks.append(nn.Conv3d(channels, filters, kernel_size, padding=before))
            else:
                blocks.append(nn.ConstantPad3d((before, after) * 3, 0.0))
                blocks.append(nn.Conv3d(channels, filters, kernel_size))
            blocks += [nn.LeakyReLU(SLOPE), nn.MaxPool3d(2)]
            channels, size = filters, size // 2
        self.features = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * size**3, 128),
            nn.LeakyReLU(SLOPE),
            nn.Dropout(dropout),
            nn.Linear(128, 64),
            nn.LeakyReLU(SLOPE),
            nn.Dropout(dropout),
            nn.Linear(64, TARGETS),
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv3d, nn.Linear)):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, volume: Tensor) -> Tensor:
        """Predict the scaled parameters."""
        return REACH * torch.tanh(self.head(self.features(volume)))


def task(parameters: Mapping[str, Any]) -> Task:
    """Return CosmoFlow with these fields.

    Stored samples: int16 counts (size, size, size, 4), channels last as in the TFRecords; float32 targets (4,).

    Raises:
        ValueError: nothing is left of the volume after the last layer.
    """
    require(cosmoflow_conflicts, parameters)
    size, layers = int(parameters["input_size"]), int(parameters["layers"])
    channels_last = bool(parameters["channels_last"])

    def model() -> nn.Module:
        network = CosmoFlow(
            kernel_size=int(parameters["kernel_size"]),
            input_size=size,
            layers=layers,
            base_channels=int(parameters["base_channels"]),
            dropout=float(parameters["dropout"]),
        )
        return laid_out(network, channels_last=channels_last, dimensions=5)

    def prepare(counts: Tensor, targets: Tensor) -> Tuple[Tensor, Tensor]:
        volume = channels_first(counts, channels_last=channels_last)
        return torch.log1p(volume.float()), targets.float()

    return Task(
        name="cosmoflow",
        model=model,
        prepare=prepare,
        loss=functional.mse_loss,
        optimizer=optimizer_of(parameters),
        input=TensorSpec((size, size, size, CHANNELS), torch.int16),
        target=TensorSpec((TARGETS,), torch.float32),
        low=0.0,
        high=16.0,
    )
