// Bulk copies by the tensor memory accelerator (sm_90). One thread issues; an mbarrier in shared memory counts the
// bytes.
#pragma once
#include "common/types.cuh"

struct TensorMap;  // of the arguments, where there are some

// One box of a rank-4 map at (column, row, head, batch); what lies outside the array arrives as zeros and counts as
// bytes.
__device__ inline void tma_load(u32 shared, const TensorMap& map, u32 barrier, int column, int row, int head,
                                int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// The same into every block of the cluster that the mask names, to where it would go in this one; each block's own
// barrier counts the bytes.
__device__ inline void tma_load_to_cluster(u32 shared, const TensorMap& map, u32 barrier, int column, int row, int head,
                                           int batch, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(blocks)
        : "memory");
}
