// Tree attention that reads the cache where it is; the twin of the torch function of that name. On
// x86 a row has the bits of vLLM's own decode row for its path (`calls.tree_attention`).
//
// Plain C interface, tensors as pointers; all integers are int64 unless said otherwise. Compiled on
// the machine that runs it (build.py).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "tree_columns.h"

namespace {

// Queries that share each load of a key or value: as many as keep their sums in registers.
#ifdef __AVX512F__
constexpr int64_t TILE = 8;
#else
constexpr int64_t TILE = 6;
#endif
// Of a job: queries, and lanes of tokens that a thread scores at a time.
constexpr int64_t MOST_QUERIES = 48, LANES_AT_ONCE = 4;
constexpr size_t MOST_SCORES = 1 << 18;  // that are kept at once, but for those of one job

// Some queries of a KV head of a request, from `begin` to `end`.
template <typename T>
struct Job {
  int64_t request, kv_head, begin, end;
  std::vector<T> packed;
  Cache<T> cache, own;
  Columns<T> columns;
  float *scores, *inverse;  // [queries, columns], and of each query what its weights add up to

  Job(const Attention& a, int64_t request, int64_t kv_head, int64_t begin, int64_t end)
      : request(request), kv_head(kv_head), begin(begin), end(end),
        cache(cache_of<T>(a, request, kv_head)),
        own(a.own_keys.base ? pack_own(a, request, kv_head, packed) : Cache<T>{}),
        columns(a, cache, own, request, end) {}

  int64_t count() const { return end - begin; }
  Query<T> query(const Attention& a, int64_t i) const { return {a, request, kv_head, begin + i}; }
};

template <typename T>
std::vector<Job<T>> jobs_of(const Attention& a, int64_t most_queries) {
  std::vector<Job<T>> jobs;
  for (int64_t request = 0; request < a.trees.batch; request++) {
    const int64_t queries = a.trees.num_rows[request] * (a.heads / a.kv_heads);
    const int64_t parts = (queries + most_queries - 1) / most_queries;  // of nearly one size
    for (int64_t kv_head = 0; kv_head < a.kv_heads; kv_head++) {
      for (int64_t i = 0; i < parts; i++) {
        jobs.emplace_back(a, request, kv_head, i * queries / parts, (i + 1) * queries / parts);
      }
    }
  }
  return jobs;
}

// What threads compute in; vectors keep their memory from one use to the next.
template <typename T>
struct Scratch {
  std::vector<float> queries, scores, sums;
  std::vector<T> halves;
};

// Calls `use` for each tile of some queries, with their number, as a constant, and the first one.
template <int64_t N = TILE, typename Use>
inline void with_size(int64_t size, const Use& use) {
  if constexpr (N > 1) {
    if (size < N) return with_size<N - 1>(size, use);
  }
  use(std::integral_constant<int64_t, N>{});
}
template <typename Use>
inline void in_tiles(int64_t count, const Use& use) {
  const int64_t tiles = (count + TILE - 1) / TILE;  // of nearly one size
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t first = tile * count / tiles;
    with_size((tile + 1) * count / tiles - first, [&](auto size) { use(size, first); });
  }
}

// sums[i][0..15] += side[0..15] * factors[i * stride]
template <int64_t N, typename T>
inline void add_products(Vec (&sums)[N][PARTS], const T* side, const float* factors,
                         int64_t stride) {
  Vec lanes[PARTS];
  for (int64_t p = 0; p < PARTS; p++) lanes[p] = kept(load(side + p * WIDTH));
  for (int64_t i = 0; i < N; i++) {
    const Vec factor = splat(factors[i * stride]);
    for (int64_t p = 0; p < PARTS; p++) sums[i][p] = add_product(sums[i][p], lanes[p], factor);
  }
}

// The scores of a job's queries in some columns: scaled queries . keys
template <typename T>
void score(const Attention& a, const Job<T>& job, int64_t begin, int64_t end,
           std::vector<float>& queries) {
  const int64_t dim = a.dim, stride = job.columns.padded;
  queries.resize(job.count() * dim);  // converted and scaled once, not at each key
  for (int64_t i = 0; i < job.count(); i++) {
    const T* in = job.query(a, i).in;
    for (int64_t d = 0; d < dim; d++) queries[i * dim + d] = to_float(in[d]) * a.scale;
  }
  for (int64_t column = begin; column < end; column += LANES) {
    const auto [cache, tokens, first] = job.columns.segment_of(column);
    const int64_t token = column - first, block_size = cache.block_size;
    const T* keys = cache.keys(token) + token % block_size;
    in_tiles(job.count(), [&](auto size, int64_t tile) {
      constexpr int64_t N = decltype(size)::value;
      Vec sums[N][PARTS] = {};
      const float* factors = queries.data() + tile * dim;
      for (int64_t d = 0; d < dim; d++) {
        __builtin_prefetch(keys + d * block_size + LANES);
        add_products<N>(sums, keys + d * block_size, factors + d, dim);
      }
      for (int64_t i = 0; i < N; i++) {
        std::memcpy(job.scores + (tile + i) * stride + column, sums[i], LANES * 4);
      }
    });
  }
}

// Dimensions d .. d + 15 of the output of a job's queries: weights . values
template <typename T>
void weigh(const Attention& a, const Job<T>& job, int64_t d, std::vector<float>& sums) {
  const int64_t dim = a.dim, stride = job.columns.padded;
  sums.assign(job.count() * LANES, 0.0f);
  for (const auto& [cache, tokens, column] : job.columns.segments) {
    for (int64_t begin = 0; begin < tokens; begin += cache.block_size) {
      const T* values = cache.values(begin) + d;
      const float* weights = job.scores + column + begin;
      const int64_t count = std::min(tokens - begin, cache.block_size);
      in_tiles(job.count(), [&](auto size, int64_t tile) {
        constexpr int64_t N = decltype(size)::value;
        Vec of_tile[N][PARTS];
        float* kept = sums.data() + tile * LANES;
        std::memcpy(of_tile, kept, sizeof(of_tile));
        const float* factors = weights + tile * stride;
        for (int64_t token = 0; token < count; token++) {
          add_products<N>(of_tile, values + token * dim, factors + token, stride);
        }
        std::memcpy(kept, of_tile, sizeof(of_tile));
      });
    }
  }
  for (int64_t i = 0; i < job.count(); i++) {
    T* out = job.query(a, i).out + d;
    for (int64_t p = 0; p < PARTS; p++) {
      store(out + p * WIDTH, load(sums.data() + i * LANES + p * WIDTH) * job.inverse[i]);
    }
  }
}

#ifdef HAS_AMX
// Attends from at most 32 queries of the AMX layout, more than 16 of them if TWO.
template <bool TWO>
void attend_amx(const Attention& a, const Job<bf16>& job, Scratch<bf16>& scratch) {
  constexpr int64_t N = TWO ? AMX_QUERIES : TILE_ROWS;
  const Columns<bf16>& columns = job.columns;
  const int64_t count = job.count(), stride = columns.padded + TILE_DEPTH;
  scratch.scores.resize(N * stride);
  scratch.halves.assign(N * std::max(a.dim, stride), bf16{});
  float* scores = scratch.scores.data();
  bf16* halves = scratch.halves.data();  // the queries, and later the weights
  for (int64_t i = 0; i < count; i++) {
    std::copy_n(job.query(a, i).in, a.dim, halves + i * a.dim);
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
    const Query<bf16> query = job.query(a, i);
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
      bf16* out = job.query(a, i).out;
      Vec values = load(scores + i * LANES) * inverse[i];
      store_halves(out + d, reinterpret_cast<float*>(&values), LANES);
    }
  }
}

void attend_by_amx(const Attention& a, int64_t threads) {
  const std::vector<Job<bf16>> jobs = jobs_of<bf16>(a, AMX_QUERIES);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch<bf16> scratch;
    const Tiles tiles;
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < jobs.size(); i++) {
      auto attend = jobs[i].count() > TILE_ROWS ? attend_amx<true> : attend_amx<false>;
      attend(a, jobs[i], scratch);
    }
  }
}
#endif

// What a thread takes at a time of a job: columns, a query, or the first of 16 dimensions.
template <typename T>
struct Part {
  const Job<T>* job;
  int64_t begin, end;
};

// All threads score, exponentiate and weigh together, so that a few heads are enough for many.
template <typename T>
void attend(const Attention& a, int64_t threads) {
  static thread_local std::vector<float> kept;
  std::vector<Job<T>> jobs = jobs_of<T>(a, MOST_QUERIES);
  for (size_t first = 0, last; first < jobs.size(); first = last) {
    std::vector<Part<T>> columns, queries, dims;
    size_t num_scores = 0;
    for (last = first; last < jobs.size(); last++) {
      const Job<T>& job = jobs[last];
      const size_t size = job.count() * (job.columns.padded + 1);
      if (last > first && num_scores + size > MOST_SCORES) break;
      num_scores += size;
      const int64_t padded = job.columns.padded;
      for (int64_t c = 0; c < padded; c += LANES_AT_ONCE * LANES) {
        columns.push_back({&job, c, std::min(padded, c + LANES_AT_ONCE * LANES)});
      }
      for (int64_t i = 0; i < job.count(); i++) queries.push_back({&job, i, i + 1});
      for (int64_t d = 0; d < a.dim; d += LANES) dims.push_back({&job, d, d + LANES});
    }
    if (kept.size() < num_scores) kept.resize(num_scores);
    float* scores = kept.data();
    for (size_t i = first; i < last; i++) {
      jobs[i].scores = scores, jobs[i].inverse = scores + jobs[i].count() * jobs[i].columns.padded;
      scores = jobs[i].inverse + jobs[i].count();
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Scratch<T> scratch;
#pragma omp for schedule(dynamic)
      for (const auto& [job, begin, end] : columns) score(a, *job, begin, end, scratch.queries);
#pragma omp for schedule(dynamic)
      for (const auto& [job, i, _] : queries) {
        float* scores = job->scores + i * job->columns.padded;
        job->inverse[i] = job->columns.softmax(scores, job->query(a, i));
      }
#pragma omp for schedule(dynamic)
      for (const auto& [job, d, _] : dims) weigh(a, *job, d, scratch.sums);
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
#ifdef HAS_AMX
  if (amx) {
    attend_by_amx(a, threads);
    return;
  }
#endif
  if (is_bf16) attend<bf16>(a, threads);
  else attend<float>(a, threads);
}

}  // extern "C"
