// Tree attention that reads the cache where it is; the twin of the torch function of that name. On
// x86 a row has the bits of vLLM's own decode row for its path (`calls.tree_attention`).
//
// Plain C interface, tensors as pointers; all integers are int64 unless said otherwise. Compiled on
// the machine that runs it (build.py).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "amx.h"
#include "tree_columns.h"

namespace {

// Query rows that share each load of a key or value: as many as keep their sums in registers.
#ifdef __AVX512F__
constexpr int64_t TILE = 8;
#else
constexpr int64_t TILE = 6;
#endif

// sums[i][0..15] += side[0..15] * factors[i][at]
template <int64_t N, typename T>
inline void add_products(Vec (&sums)[N][PARTS], const T* side, const float* const* factors,
                         int64_t at) {
  Vec lanes[PARTS];
  for (int64_t p = 0; p < PARTS; p++) lanes[p] = load(side + p * WIDTH);
  for (int64_t i = 0; i < N; i++) {
    const Vec factor = splat(factors[i][at]);
    for (int64_t p = 0; p < PARTS; p++) sums[i][p] = add_product(sums[i][p], lanes[p], factor);
  }
}

// scores[i][0..15] = q[i] . keys of tokens token .. token + 15
template <int64_t N, typename T>
void score_lanes(const float* const* q, const Cache<T>& cache, int64_t token,
                 Vec (&scores)[N][PARTS]) {
  const T* keys = cache.keys(token) + token % cache.block_size;
  Vec sums[N][PARTS] = {};
  for (int64_t d = 0; d < cache.dim; d++) add_products<N>(sums, keys + d * cache.block_size, q, d);
  std::memcpy(scores, sums, sizeof(sums));
}

// out[i][0..15] += sum over tokens of weights[i][token] * values of dimensions d .. d + 15
template <int64_t N, typename T>
void weigh_lanes(const float* const* weights, const Segment<T>& part, int64_t d,
                 Vec (&out)[N][PARTS]) {
  const auto [cache, tokens, column] = part;
  Vec sums[N][PARTS];
  std::memcpy(sums, out, sizeof(sums));
  for (int64_t begin = 0; begin < tokens; begin += cache.block_size) {
    const T* values = cache.values(begin) + d;
    const int64_t end = std::min(tokens, begin + cache.block_size);
    for (int64_t token = begin; token < end; token++, values += cache.dim) {
      add_products<N>(sums, values, weights, column + token);
    }
  }
  std::memcpy(out, sums, sizeof(sums));
}

// What a thread computes in; vectors keep their memory from tile to tile.
template <typename T>
struct Scratch {
  std::vector<float> queries, scores;
  std::vector<T> halves, own;
};

template <int64_t N, typename T>
void attend_tile(const Attention& a, const Cache<T>& cache, const Cache<T>& own, int64_t request,
                 int64_t kv_head, int64_t begin, Scratch<T>& scratch) {
  const Columns<T> columns(a, cache, own, request, begin + N);
  scratch.scores.resize(N * columns.padded);
  scratch.queries.resize(N * a.dim);
  const float* queries[N];  // converted and scaled once, not at each key
  float* scores[N];
  for (int64_t i = 0; i < N; i++) {
    const T* in = Query<T>(a, request, kv_head, begin + i).in;
    float* query = scratch.queries.data() + i * a.dim;
    for (int64_t d = 0; d < a.dim; d++) query[d] = to_float(in[d]) * a.scale;
    queries[i] = query;
    scores[i] = scratch.scores.data() + i * columns.padded;
  }
  Vec lanes[N][PARTS];
  for (const Segment<T>& part : columns.segments) {
    for (int64_t token = 0; token < part.tokens; token += LANES) {
      score_lanes<N>(queries, part.cache, token, lanes);
      for (int64_t i = 0; i < N; i++) {
        std::memcpy(scores[i] + part.column + token, lanes[i], LANES * 4);
      }
    }
  }
  float inverse[N];
  T* out[N];
  for (int64_t i = 0; i < N; i++) {
    const Query<T> query(a, request, kv_head, begin + i);
    inverse[i] = columns.softmax(scores[i], query);
    out[i] = query.out;
  }
  for (int64_t d = 0; d < a.dim; d += LANES) {
    std::memset(lanes, 0, sizeof(lanes));
    for (const Segment<T>& part : columns.segments) weigh_lanes<N>(scores, part, d, lanes);
    for (int64_t i = 0; i < N; i++) {
      for (int64_t p = 0; p < PARTS; p++) store(out[i] + d + p * WIDTH, lanes[i][p] * inverse[i]);
    }
  }
}

#ifdef HAS_AMX
// As `attend_tile`, for at most 32 queries of the AMX layout, more than 16 of them if TWO.
template <bool TWO>
void attend_amx(const Attention& a, const Cache<bf16>& cache, const Cache<bf16>& own,
                int64_t request, int64_t kv_head, int64_t begin, int64_t end,
                Scratch<bf16>& scratch) {
  constexpr int64_t N = TWO ? AMX_QUERIES : TILE_ROWS;
  const Columns<bf16> columns(a, cache, own, request, end);
  const int64_t count = end - begin, stride = columns.padded + TILE_DEPTH;
  scratch.scores.resize(N * stride);
  scratch.halves.assign(N * std::max(a.dim, stride), bf16{});
  float* scores = scratch.scores.data();
  bf16* halves = scratch.halves.data();  // the queries, and later the weights
  for (int64_t i = 0; i < count; i++) {
    std::copy_n(Query<bf16>(a, request, kv_head, begin + i).in, a.dim, halves + i * a.dim);
  }
  for (const Segment<bf16>& part : columns.segments) {
    const auto& [at, tokens, column] = part;
    for (int64_t token = 0; token < tokens; token += LANES) {
      const bf16* keys = at.keys(token) + token % at.block_size * a.dim;
      score_tile<TWO>(halves, a.dim, keys, scores + column + token, stride);
    }
  }
  float inverse[N];
  for (int64_t i = 0; i < count; i++) {
    const Query<bf16> query(a, request, kv_head, begin + i);
    for (int64_t c = 0; c < columns.padded; c++) scores[i * stride + c] *= a.scale;
    inverse[i] = columns.softmax(scores + i * stride, query);
    store_halves(halves + i * stride, scores + i * stride, columns.padded);
  }
  for (int64_t d = 0; d < a.dim; d += LANES) {
    _tile_zero(0);
    if (TWO) _tile_zero(1);
    for (const Segment<bf16>& part : columns.segments) {
      const auto& [at, tokens, column] = part;
      for (int64_t token = 0; token < tokens; token += TILE_DEPTH) {
        const bf16* values =
            at.values(token) + d * at.block_size + token % at.block_size * LANES;
        const int64_t rest = std::min(TILE_DEPTH, tokens - token);
        weigh_tile<TWO>(halves + column + token, stride, values, rest);
      }
    }
    _tile_stored(0, scores, LANES * 4);  // nobody needs the scores any more
    if (TWO) _tile_stored(1, scores + TILE_ROWS * LANES, LANES * 4);
    for (int64_t i = 0; i < count; i++) {
      bf16* out = Query<bf16>(a, request, kv_head, begin + i).out;
      Vec values = load(scores + i * LANES) * inverse[i];
      store_halves(out + d, reinterpret_cast<float*>(&values), LANES);
    }
  }
}
#endif

// The queries of one KV head from `begin` to `end`, at most N.
template <int64_t N, typename T>
void attend_queries(const Attention& a, const Cache<T>& cache, const Cache<T>& own,
                    int64_t request, int64_t kv_head, int64_t begin, int64_t end,
                    Scratch<T>& scratch) {
#ifdef HAS_AMX
  if constexpr (sizeof(T) == sizeof(bf16)) {
    if (a.amx) {
      auto attend = end - begin > TILE_ROWS ? attend_amx<true> : attend_amx<false>;
      attend(a, cache, own, request, kv_head, begin, end, scratch);
      return;
    }
  }
#endif
  if constexpr (N > 1) {
    if (end - begin < N) {
      attend_queries<N - 1, T>(a, cache, own, request, kv_head, begin, end, scratch);
      return;
    }
  }
  attend_tile<N, T>(a, cache, own, request, kv_head, begin, scratch);
}

// Some queries of a KV head of a request: what a thread takes at a time.
struct Work {
  int64_t request, kv_head, begin, end;
};

template <typename T>
void attend(const Attention& a, int64_t threads) {
  const int64_t group = a.heads / a.kv_heads;
  int64_t most = TILE;
#ifdef HAS_AMX
  if (a.amx) most = AMX_QUERIES;
#endif
  std::vector<Work> works;
  for (int64_t request = 0; request < a.trees.batch; request++) {
    const int64_t queries = a.trees.num_rows[request] * group;
    const int64_t tiles = (queries + most - 1) / most;  // of nearly one size
    for (int64_t kv_head = 0; kv_head < a.kv_heads; kv_head++) {
      for (int64_t tile = 0; tile < tiles; tile++) {
        works.push_back({request, kv_head, tile * queries / tiles, (tile + 1) * queries / tiles});
      }
    }
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch<T> scratch;
#ifdef HAS_AMX
    std::optional<Tiles> tiles;
    if (a.amx) tiles.emplace();
#endif
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < works.size(); i++) {
      const auto [request, kv_head, begin, end] = works[i];
      const int64_t head_size = a.block_size * 2 * a.dim;
      const Cache<T> cache = {static_cast<const T*>(a.kv_cache) + kv_head * head_size,
                              a.kv_heads * head_size, a.block_size, a.dim,
                              a.trees.block_table + request * a.trees.table_stride +
                                  a.passed_blocks(request)};
      Cache<T> own = {};
      if (a.own_keys.base) own = pack_own(a, request, kv_head, scratch.own);
      attend_queries<TILE, T>(a, cache, own, request, kv_head, begin, end, scratch);
    }
  }
}

}  // namespace

extern "C" {

// 1 where the AMX layout can be read on this machine.
int64_t reads_amx_layout() {
#ifdef HAS_AMX
  return may_use_amx();
#else
  return 0;
#endif
}

void tree_attention(const Queries* trees, void* query, int64_t query_stride, void* output,
                    int64_t output_stride, const void* kv_cache, void* own_keys,
                    int64_t own_key_stride, void* own_values, int64_t own_value_stride,
                    const float* sinks, int64_t heads, int64_t kv_heads, int64_t dim,
                    int64_t block_size, int64_t window, int64_t amx, int64_t is_bf16, float scale,
                    int64_t threads) {
  const Attention a = {*trees, {query, query_stride}, {output, output_stride}, kv_cache,
                       {own_keys, own_key_stride}, {own_values, own_value_stride}, sinks,
                       heads, kv_heads, dim, block_size, window, amx, scale};
  if (is_bf16) attend<bf16>(a, threads);
  else attend<float>(a, threads);
}

}  // extern "C"
