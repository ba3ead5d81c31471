// The generated prologue's macros as typed constants. Everything the host injects is asserted here or where it is used.
#pragma once
#include "common/types.cuh"

constexpr int kRows = SKL_ROWS;        // rows of the stationary tile (one block of threads)
constexpr int kColumns = SKL_COLUMNS;  // rows of each streamed tile: the columns of the score tile
constexpr int kWarps = SKL_WARPS;
constexpr int kWarpTiles = SKL_WARP_TILES;  // 16-row matrix tiles per warp
constexpr int kStages = SKL_STAGES;         // streamed tiles in flight
#ifndef SKL_COLUMN_WARPS
#define SKL_COLUMN_WARPS 1
#endif
constexpr int kColumnWarps = SKL_COLUMN_WARPS;  // warps that share 16-row tiles, each with some of the columns
constexpr int kThreads = kWarps * kColumnWarps * 32;
constexpr bool kRowsAreQueries = SKL_ROWS_ARE_QUERIES;  // or the queries are streamed past stationary keys

#ifndef SKL_TURNS
#define SKL_TURNS 0
#endif
enum : bool { kTurns = SKL_TURNS };  // whether all warpgroups have the same rows, and take streamed tiles in turns

static_assert(kRows == (kTurns ? 4 : kWarps) * kWarpTiles * 16, "plan: rows must be warps x warp_tiles x 16");
static_assert(kColumns % 16 == 0, "plan: columns must be a multiple of 16, the depth of one matrix product");
static_assert(kStages >= 1, "plan: stages");
