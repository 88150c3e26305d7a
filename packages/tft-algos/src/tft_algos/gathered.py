"""Sparse reductions over a process group: each member gathers what all members send, and adds it.

Of a sum of sparse contributions many more numbers are set than of each, so a rounding of the sum to a few numbers would
lose the others. Hence nobody owns a chunk. All members decode the same bytes and add them in the order of the ranks, so
they end with equal bits. A member receives the rows of every other member.

Law of this file: the exchange of a sparse reduction. The arithmetic of blocks is in `quantization`, and the life of a
Work in `encoded_work`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from tft_algos.agreement import Issue, at_once
from tft_algos.encoded_work import Exchange
from tft_algos.errors import ContributionError
from tft_algos.quantization.codecs import write_back
from tft_algos.quantization.feedback import Compensation
from tft_algos.quantization.top_k import TopK


@final
class RowExchange(Exchange):
    """A sum of one tensor over a process group, of which each member sends a few numbers.

    Args:
        group: any number of ranks.
        codec: encodes the numbers.
        tensor: the contribution, and receives the sum.
        compensation: error feedback of the tensor.
        issue: starts a collective, if the group is still configured as it was.
    """

    def __init__(
        self, group: Any, codec: TopK, tensor: torch.Tensor, *, compensation: Compensation, issue: Issue = at_once
    ) -> None:
        self._group = group
        self._codec = codec
        self._tensor = tensor
        self._compensation = compensation
        self._issue = issue
        self._num_ranks: int = group.size()
        self._num_elements = 0
        self._received: torch.Tensor | None = None
        self._gathering: dist.Work | None = None

    def begin(self) -> None:
        values = self._compensation.compensated([self._tensor])
        self._num_elements = values.numel()
        shape = self._codec.num_rows(values.numel()), self._codec.row_bytes
        sent = torch.empty(shape, dtype=torch.uint8, device=values.device)
        self._codec.encode(values, sent)
        self._compensation.sent(self._codec, sent)
        # The size follows from the own tensor alone, whatever another member sends.
        received = torch.empty(self._num_ranks * shape[0], shape[1], dtype=torch.uint8, device=values.device)
        self._received = received
        self._gathering = self._issue(lambda: self._group._allgather_base(received.view(-1), sent.view(-1)))

    def proceed(self, timeout: timedelta | None) -> dist.Work | None:
        return self._gathering  # the first collective is the last one

    def write(self) -> None:
        """Write the sum into the tensor, which is undefined if a contribution can't be added.

        Raises: ContributionError: a member's rows are damaged, or not finite.
        """
        assert self._received is not None, "the exchange has not begun"
        tensor = self._tensor
        if tensor.dtype == torch.float32 and tensor.is_contiguous():
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                self._add_all(self._received, tensor.detach().view(-1))
            return
        total = torch.empty(self._num_elements, dtype=torch.float32, device=tensor.device)
        self._add_all(self._received, total)
        write_back(total, [tensor])

    def _add_all(self, received: torch.Tensor, total: torch.Tensor) -> None:
        """Write the sum of all rows, in the order of the ranks."""
        for rank, rows in enumerate(received.chunk(self._num_ranks)):
            try:
                self._codec.check_levels(rows)
                if rank:
                    self._codec.add_to(rows, total)
                else:
                    self._codec.decode(rows, total)
            except ValueError as error:
                raise ContributionError(
                    f"replica rank {rank} sent a contribution that can't be added: {error}; the sync fails on all "
                    "replicas, so look for numbers that are not finite on that replica",
                    replica_rank=rank,
                ) from error

    def release(self) -> None:
        self._received = self._gathering = None
