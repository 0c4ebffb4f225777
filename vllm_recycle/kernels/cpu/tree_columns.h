// What the rows of trees see, as columns of scores: the context in the cache, and the rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "softmax.h"

namespace {

// One KV head of one layer: `block(b)` is where that head's keys of block b begin.
template <typename T>
struct Cache {
  const T* base;
  int64_t block_stride, block_size, dim;
  const int32_t* blocks;  // of the request

  const T* keys(int64_t token) const {
    return base + blocks[token / block_size] * block_stride;
  }
  const T* values(int64_t token) const { return keys(token) + block_size * dim; }
};

// Tokens with neighbouring columns of the scores, from `column` on.
template <typename T>
struct Segment {
  Cache<T> cache;
  int64_t tokens, column;
};

inline int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// The trees of a step, which all layers share; see TreeQueries, and `calls._Queries`.
struct Queries {
  const int64_t* root_rows;
  const int64_t* num_rows;
  const int64_t* num_context;
  const int32_t* block_table;
  const uint8_t* mask;
  const int64_t* depths;
  int64_t batch, table_stride, mask_batch_stride, mask_stride, depths_stride;
};

// The rows of a forward, and how far they are apart.
struct Rows {
  void* base;
  int64_t stride;

  template <typename T>
  T* at(int64_t row) const { return static_cast<T*>(base) + row * stride; }
};

struct Attention {
  const Queries& trees;
  Rows query, output;
  const void* kv_cache;
  Rows own_keys, own_values;  // of the forward's rows; none where the cache has them
  const float* sinks;  // of each head; null where there are none
  int64_t heads, kv_heads, dim, block_size;
  int64_t window;  // a row sees so many of the positions up to its own
  int64_t amx;
  float scale;

  // The first blocks of a request that are in no row's window. vLLM may have given them to others.
  int64_t passed_blocks(int64_t request) const {
    return std::max<int64_t>(0, trees.num_context[request] + 1 - window) / block_size;
  }
};

template <typename T>
Cache<T> cache_of(const Attention& a, int64_t request, int64_t kv_head) {
  const int64_t head_size = a.block_size * 2 * a.dim;
  return {static_cast<const T*>(a.kv_cache) + kv_head * head_size, a.kv_heads * head_size,
          a.block_size, a.dim,
          a.trees.block_table + request * a.trees.table_stride + a.passed_blocks(request)};
}

// The own keys and values of a tree's rows as a cache of one block, made in `buffer`.
template <typename T>
Cache<T> pack_own(const Attention& a, int64_t request, int64_t kv_head, std::vector<T>& buffer) {
  static constexpr int32_t ONLY_BLOCK = 0;
  const int64_t rows = a.trees.num_rows[request], size = whole_lanes(rows), dim = a.dim;
  buffer.resize(2 * size * dim);
  T* keys = buffer.data();
  T* values = keys + size * dim;
  for (int64_t t = 0; t < rows; t++) {
    const int64_t row = a.trees.root_rows[request] + t;
    const T* key = a.own_keys.at<T>(row) + kv_head * dim;
    const T* value = a.own_values.at<T>(row) + kv_head * dim;
    for (int64_t d = 0; d < dim; d++) {
      if (a.amx) {
        keys[t / LANES * LANES * dim + d / 2 * 32 + t % LANES * 2 + d % 2] = key[d];
        values[d / LANES * LANES * size + t / 2 * 32 + d % LANES * 2 + t % 2] = value[d];
      } else {
        keys[d * size + t] = key[d];
        values[t * dim + d] = value[d];
      }
    }
  }
  return {buffer.data(), 0, size, dim, &ONLY_BLOCK};
}

// One query of a KV head of a request, by its number.
template <typename T>
struct Query {
  const T* in;
  T* out;
  const uint8_t* visible;
  int64_t reach;          // positions that it sees before the root's
  float sink;

  Query(const Attention& a, int64_t request, int64_t kv_head, int64_t index) {
    const int64_t group = a.heads / a.kv_heads, row = index / group;
    const int64_t head = kv_head * group + index % group, token = a.trees.root_rows[request] + row;
    in = a.query.at<T>(token) + head * a.dim;
    out = a.output.at<T>(token) + head * a.dim;
    visible = a.trees.mask + request * a.trees.mask_batch_stride + row * a.trees.mask_stride;
    reach = a.window - 1 - a.trees.depths[request * a.trees.depths_stride + row];
    sink = a.sinks ? a.sinks[head] : -INFINITY;
  }
};

// The columns of the scores of queries before `end`: the context, and the rows that these see.
template <typename T>
struct Columns {
  int64_t context, rows, first_row, padded;
  Segment<T> segments[2];

  Columns(const Attention& a, const Cache<T>& cache, const Cache<T>& own, int64_t request,
          int64_t end) {
    context = a.trees.num_context[request] - a.passed_blocks(request) * a.block_size;
    rows = (end - 1) / (a.heads / a.kv_heads) + 1;  // None sees further than the last.
    first_row = own.base ? whole_lanes(context) : context;
    padded = whole_lanes(first_row + rows);
    segments[0] = {cache, own.base ? context : context + rows, 0};
    segments[1] = {own, own.base ? rows : 0, first_row};
  }

  const Segment<T>& segment_of(int64_t column) const {
    return segments[segments[1].tokens && column >= segments[1].column];
  }

  // The scores of a row's ancestors go to the columns behind the context, where a chain has them,
  // and their weights back: the lane that a weight is added in shows in the last bit of the sum.
  float softmax(float* scores, const Query<T>& query) const {
    int64_t end = context;
    for (int64_t r = 0; r < rows; r++) {
      if (query.visible[r]) scores[end++] = scores[first_row + r];
    }
    std::fill_n(scores, std::clamp<int64_t>(context - query.reach, 0, end), HIDDEN);
    std::fill(scores + end, scores + whole_lanes(end), HIDDEN);
    const float inverse = softmax_row(scores, whole_lanes(end), query.sink);
    for (int64_t r = rows - 1; r >= 0; r--) {
      scores[first_row + r] = query.visible[r] ? scores[--end] : 0;
    }
    std::fill(scores + first_row + rows, scores + padded, 0.0f);
    return inverse;
  }
};

}  // namespace
