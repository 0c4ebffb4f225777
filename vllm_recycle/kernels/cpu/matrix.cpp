// Drafting from the adjacency matrix and learning from a step; twins of functions in core/.
//
// Plain C interface, tensors as pointers; all integers are int64 unless said otherwise. Compiled on
// the machine that runs it (build.py).

#include <algorithm>
#include <cstdint>
#include <queue>
#include <tuple>
#include <vector>

#include "top_k.h"

namespace {

constexpr int64_t STEADINESSES = 4;
constexpr int64_t CELLS = STEADINESSES + 1;  // and one for all of them
constexpr int64_t NUM_CLASSES = 4, NUM_COUNTED = 2;  // of requests, see adjacency.py
constexpr int64_t PRIVATE_SALT = 1 << 30;
constexpr int64_t MAX_REACH = 16;
constexpr int64_t SLICE = 32;  // of a text, see learn.py
constexpr int64_t MAX_CHAIN = 24, NEXT_ROWS = 32;
constexpr int64_t NO_PLACE = -1, ALL_RANKS = INT64_MAX;
constexpr double MOST_SEEN = 2000.0, PRIOR_WEIGHT = 4.0;
constexpr uint64_t MIX = 0x9E3779B97F4A7C15u, FINISH = 0xD6E8FEB86659FD93u;

// The table and its layout, see MatrixLayout; as calls.py fills it in.
struct Matrix {
  int32_t* table;
  const int64_t *salts, *classes;  // by req_state_idx
  int64_t vocab, k, slots, has_own, has_shared, parts, num_contexts;
  int64_t lengths[MAX_REACH];  // of contexts, ascending from 1

  int64_t reach() const { return lengths[num_contexts - 1]; }
  int64_t num_ranks() const { return num_contexts * 2 * k; }  // that are counted of a class
  int32_t* entry(int64_t address) const { return table + address * (k + 2); }
  bool is_token(int64_t token) const { return uint64_t(token) < uint64_t(vocab); }
};

// Tokens, the newest first.
struct Context {
  int64_t tokens[MAX_REACH];

  Context below(int64_t token) const {
    Context child;
    child.tokens[0] = token;
    std::copy(tokens, tokens + MAX_REACH - 1, child.tokens + 1);
    return child;
  }
};

Context no_context() {
  Context context;
  std::fill(context.tokens, context.tokens + MAX_REACH, -1);
  return context;
}

// Where texts end, see Ends.
struct Ends {
  const int32_t* token_ids;
  const uint8_t* is_token;
  int64_t stride;  // of both
  const int64_t* last_positions;

  Context tail(int64_t b, int64_t reach) const {
    Context context = no_context();
    for (int64_t i = 0, place = last_positions[b]; i < reach && place >= 0; i++, place--) {
      if (is_token && !is_token[b * stride + place]) continue;
      context.tokens[i] = token_ids[b * stride + place];
    }
    return context;
  }
};

struct Address {
  int64_t index, own;
  int32_t* entry;
  int32_t head, salt;
  int64_t k;

  bool is_known() const { return entry[0] >> 2 == head >> 2 && entry[k + 1] == salt; }
};

// Calls `visit` with the address of each entry of a context, the shortest first, shared before own.
template <typename Visit>
void each_address(const Matrix& matrix, const Context& context, int64_t salt, Visit visit) {
  uint64_t context_hash = 0;
  int64_t num_hashed = 0;
  const int64_t slots = matrix.slots / matrix.parts;
  const int64_t first_address = matrix.vocab + (salt & (matrix.parts - 1)) * slots;
  for (int64_t index = 0; index < matrix.num_contexts; index++) {
    const int64_t length = matrix.lengths[index];
    for (; num_hashed < length; num_hashed++) {
      if (!matrix.is_token(context.tokens[num_hashed])) return;
      context_hash = (context_hash ^ uint64_t(context.tokens[num_hashed] + 1)) * MIX;
      context_hash ^= context_hash >> 32;
    }
    const bool is_sharing = matrix.has_shared && salt < PRIVATE_SALT;
    for (int64_t own = !is_sharing; own < 1 + matrix.has_own; own++) {
      if (length == 1 && !own) {
        const int64_t token = context.tokens[0];
        visit(Address{index, 0, matrix.entry(token), int32_t(token << 3), 0, matrix.k});
        continue;
      }
      const uint64_t hash_salt = own && matrix.parts == 1 ? uint64_t(salt) : 0;
      uint64_t key = (context_hash + hash_salt * FINISH + uint64_t(length)) * FINISH;
      key = (key ^ key >> 29) * MIX;
      const int64_t address = first_address + int64_t(key & uint64_t(slots - 1));
      const int32_t head = int32_t(key >> 36 << 3 | uint64_t(own) << 2);
      visit(Address{index, own, matrix.entry(address), head, int32_t(own ? salt : 0), matrix.k});
    }
  }
}

// Known entries of a context, by whether they are own; `entry` is null for none.
struct Known {
  Address addresses[2] = {};
};

// The known entries of the longest context that is known.
Known find_longest(const Matrix& matrix, const Context& context, int64_t salt) {
  Known longest;
  int64_t index = -1;
  each_address(matrix, context, salt, [&](const Address& address) {
    if (!address.is_known()) return;
    if (address.index != index) longest = {}, index = address.index;
    longest.addresses[address.own] = address;
  });
  return longest;
}

// An entry to be written; its steadiness is already in the head.
struct Write {
  int32_t* entry;
  int32_t head, salt;
  const int32_t* successors;
};

Write write_to(const Address& address, const int32_t* successors) {
  const bool stays = address.is_known() && address.entry[1] == successors[0];
  const int32_t steadiness = stays ? std::min(3, (address.entry[0] & 3) + 1) : 0;
  return {address.entry, address.head | steadiness, address.salt, successors};
}

void apply(const Matrix& matrix, const Write& write) {
  write.entry[0] = write.head;
  std::copy(write.successors, write.successors + matrix.k, write.entry + 1);
  write.entry[1 + matrix.k] = write.salt;
}

// Which successors of the entries that a draft may be made from were right, and all as seen.
void count(const Matrix& matrix, double* increments, const Context& context, int64_t salt,
           int64_t token) {
  for (const Address& address : find_longest(matrix, context, salt).addresses) {
    for (int64_t rank = 0; address.entry && rank < matrix.k; rank++) {
      if (address.entry[1 + rank] < 0) continue;
      const int64_t ranks = (address.index * 2 + address.own) * matrix.k + rank;
      for (int64_t steadiness : {int64_t(address.entry[0] & 3), STEADINESSES}) {
        double* cell = increments + (ranks * CELLS + steadiness) * 2;
        cell[0] += address.entry[1 + rank] == token;
        cell[1] += 1.0;
      }
    }
  }
}

void fold(double* counts, const std::vector<double>& increments) {
  for (size_t cell = 0; cell < increments.size(); cell += 2) {
    counts[cell] += increments[cell], counts[cell + 1] += increments[cell + 1];
    if (counts[cell + 1] > MOST_SEEN) counts[cell] *= 0.5, counts[cell + 1] *= 0.5;
  }
}

struct Candidate {
  double worth;
  int64_t depth, parent, rank, token, place;

  bool operator<(const Candidate& other) const {  // what comes later from a priority queue
    if (worth != other.worth) return worth < other.worth;
    return std::tie(depth, parent, rank) > std::tie(other.depth, other.parent, other.rank);
  }
};

// Drafts of one kind: what was drafted below each text, and the first nodes of it that pay.
struct Offer {
  int64_t nodes;  // that each draft has room for
  std::vector<int64_t> token_ids, parents, sizes;
  std::vector<double> worths;
  double rate;      // of the step that verifies them
  double expected;  // draft tokens that are accepted in it
  int64_t kind;     // 0 trees, 1 chains

  Offer(int64_t batch, int64_t nodes, int64_t kind)
      : nodes(nodes), token_ids(batch * nodes, -1), parents(batch * nodes), sizes(batch),
        worths(batch * nodes), kind(kind) {}
};

// See choose.Price.
struct Price {
  const double* seconds;  // null where drafts of the kind have none
  int64_t num_rows;       // that there are seconds for, and none
  double trust;
};

// What a draft model says below each text, see Trunks.
struct Trunks {
  const int64_t* token_ids;
  const double* chances;
  int64_t gamma, choices;
};

// A token that may follow a row, the chance that it does, and its place on the trunk, or NO_PLACE.
struct Follower {
  int64_t token;
  double chance;
  int64_t place;
};

// What a grammar allows at a row, see Allowed; all where there are no words.
struct Allowed {
  const int32_t* words;
  int64_t num_words, expected;

  bool has(int64_t token) const {
    if (!words) return true;
    return token / 32 < num_words && uint32_t(words[token / 32]) >> token % 32 & 1;
  }
};

// Of which texts there is a grammar, and what asks it behind a path below one of them; null for none.
struct Grammars {
  const int64_t* follows;
  void (*ask)(int64_t b, const int64_t* path, int64_t length, Allowed* allowed);

  // At a row of a tree, by the tokens of its nodes and by their parents.
  Allowed at(int64_t b, int64_t row, const int64_t* token_ids, const int64_t* parents) const {
    Allowed allowed = {nullptr, 0, -1};
    if (!ask || !follows[b]) return allowed;
    std::vector<int64_t> path;
    for (; row; row = parents[row - 1]) path.push_back(token_ids[row - 1]);
    std::reverse(path.begin(), path.end());
    ask(b, path.data(), int64_t(path.size()), &allowed);
    return allowed;
  }
};

// What is drafted from, and below which texts.
struct Source {
  const Matrix& matrix;
  const int64_t* idx_mapping;
  Ends ends;
  const int64_t* max_depths;
  Trunks trunks;
  Grammars grammars;
  int64_t batch;
  std::vector<double> rates;  // by class, successors by their ranks, and steadiness

  // The entry to draft from, the surer one; its `entry` is null where nothing is known.
  Address find(const Context& context, int64_t b) const {
    auto [shared, own] = find_longest(matrix, context, matrix.salts[idx_mapping[b]]).addresses;
    if (!own.entry) return shared;
    return shared.entry && *rates_of(shared, b) > *rates_of(own, b) ? shared : own;
  }
  const double* rates_of(const Address& address, int64_t b) const {
    const int64_t class_ranks = matrix.classes[idx_mapping[b]] * matrix.num_ranks();
    const int64_t ranks = class_ranks + (address.index * 2 + address.own) * matrix.k;
    return rates.data() + ranks * STEADINESSES + (address.entry[0] & 3);
  }
};

// See grow.bounded.
double bounded(double chance) { return chance > 0.0 ? std::min(chance, 1.0) : 0.0; }

std::vector<double> find_rates(const double* counts, int64_t num_successors) {
  std::vector<double> rates;
  rates.reserve(num_successors * STEADINESSES);
  for (int64_t i = 0; i < num_successors; i++, counts += CELLS * 2) {
    const double* all = counts + STEADINESSES * 2;
    const double prior = PRIOR_WEIGHT * (all[0] / std::max(all[1], 1.0));
    for (int64_t cell = 0; cell < STEADINESSES; cell++) {
      rates.push_back(bounded((counts[cell * 2] + prior) / (counts[cell * 2 + 1] + PRIOR_WEIGHT)));
    }
  }
  return rates;
}

void sort_best_first(std::vector<Follower>& followers) {
  std::stable_sort(
      followers.begin(), followers.end(),
      [](const Follower& a, const Follower& b) { return a.chance > b.chance; });
}

// See _following; those that are offered at a place of the trunk, and those of an entry.
void find_following(const Source& source, const Context& context, int64_t b, int64_t place,
                    std::vector<Follower>& followers) {
  const Trunks& trunks = source.trunks;
  const Address address = source.find(context, b);
  const double* rate = address.entry ? source.rates_of(address, b) : nullptr;
  followers.clear();
  if (0 <= place && place < trunks.gamma) {
    const int64_t first_choice = (b * trunks.gamma + place) * trunks.choices;
    for (int64_t i = first_choice; i < first_choice + trunks.choices; i++) {
      const int64_t token = trunks.token_ids[i];
      if (token >= 0) followers.push_back({token, bounded(trunks.chances[i]), NO_PLACE});
    }
  }
  const size_t num_offered = followers.size();
  const int64_t ranks = address.entry ? source.matrix.k - int64_t(num_offered) : 0;
  if (!num_offered) {
    for (int64_t rank = 0; rank < ranks; rank++, rate += STEADINESSES) {
      if (address.entry[1 + rank] >= 0) followers.push_back({address.entry[1 + rank], *rate, NO_PLACE});
    }
    return;
  }
  followers[0].place = place + 1;
  const bool has_first = ranks > 0 && address.entry[1] >= 0;
  const bool believes_entry = has_first && !address.own && rate[0] > followers[0].chance;
  double rest_chance = 1.0, rest_rate = 1.0;
  for (size_t i = 0; !believes_entry && i < num_offered; i++) rest_chance -= followers[i].chance;
  std::vector<bool> is_known(num_offered);
  for (int64_t rank = 0; rank < ranks; rank++, rate += STEADINESSES) {
    const int64_t token = address.entry[1 + rank];
    if (token < 0) continue;
    size_t i = 0;
    while (i < num_offered && followers[i].token != token) i++;
    if (believes_entry) rest_chance -= *rate;
    if (i == num_offered) {
      followers.push_back({token, *rate, NO_PLACE});
    } else if (believes_entry) {
      rest_rate -= followers[i].chance, followers[i].chance = *rate, is_known[i] = true;
    } else {
      rest_rate -= *rate;
    }
  }
  rest_chance = std::max(0.0, rest_chance);
  const double share = rest_chance > 0.0 ? rest_chance / std::max(rest_chance, rest_rate) : 0.0;
  for (size_t i = 0; i < followers.size(); i++) {
    const bool is_others = believes_entry ? i < num_offered && !is_known[i] : i >= num_offered;
    if (is_others) followers[i].chance *= share;
  }
  sort_best_first(followers);
}

// See grammar.keep_allowed.
void keep_allowed(const Allowed& allowed, std::vector<Follower>& followers) {
  if (!allowed.words) return;
  size_t count = 0;
  for (const Follower& follower : followers) {
    if (!allowed.has(follower.token)) continue;
    followers[count].token = follower.token, followers[count].place = follower.place;
    count++;
  }
  followers.resize(count);
  if (allowed.expected < 0) return;
  Follower expected = {allowed.expected, 1.0, NO_PLACE};
  auto is_expected = [&](const Follower& follower) { return follower.token == expected.token; };
  const auto match = std::find_if(followers.begin(), followers.end(), is_expected);
  if (match != followers.end()) expected.place = match->place, followers.erase(match);
  for (const Follower& follower : followers) expected.chance -= follower.chance;
  expected.chance = std::max(0.0, expected.chance);
  followers.push_back(expected);
  sort_best_first(followers);
}

// Returns how many nodes were grown.
int64_t grow(const Source& source, int64_t ranks, double least_worth, Offer& offer) {
  struct Row {
    Context context;
    int64_t depth, place;
  };
  int64_t num_grown = 0;
  std::vector<Row> rows(offer.nodes + 1);
  std::vector<Follower> followers;
  std::fill(offer.token_ids.begin(), offer.token_ids.end(), -1);
  std::fill(offer.worths.begin(), offer.worths.end(), 0.0);
  for (int64_t b = 0; b < source.batch; b++) {
    std::priority_queue<Candidate> heap;
    rows[0] = {source.ends.tail(b, source.matrix.reach()), 0, 0};
    double worth = 1.0;
    int64_t row = 0;
    while (true) {
      const Row& last_row = rows[row];
      if (last_row.depth < source.max_depths[b]) {
        const int64_t first_node = b * offer.nodes;
        find_following(source, last_row.context, b, last_row.place, followers);
        keep_allowed(source.grammars.at(b, row, offer.token_ids.data() + first_node,
                                        offer.parents.data() + first_node), followers);
        const int64_t count = std::min(ranks, int64_t(followers.size()));
        for (int64_t rank = 0; rank < count; rank++) {
          const Follower& follower = followers[rank];
          const double child_worth = worth * follower.chance;
          if (child_worth > least_worth) {
            heap.push({child_worth, last_row.depth + 1, row, rank, follower.token, follower.place});
          }
        }
      }
      if (heap.empty() || row == offer.nodes) break;
      const Candidate top = heap.top();
      heap.pop();
      const int64_t node = b * offer.nodes + row++;
      worth = offer.worths[node] = top.worth;
      offer.token_ids[node] = top.token, offer.parents[node] = top.parent;
      rows[row] = {rows[top.parent].context.below(top.token), top.depth, top.place};
    }
    num_grown += row;
  }
  return num_grown;
}

// For each number of rows, the least slope to any larger one; infinite for the largest.
std::vector<double> least_slopes(const double* times, int64_t num_times) {
  std::vector<double> slopes(num_times, __builtin_inf());
  std::vector<int64_t> hull = {num_times - 1};
  auto slope = [&](int64_t a, int64_t b) { return (times[b] - times[a]) / double(b - a); };
  for (int64_t row = num_times - 2; row >= 0; row--) {
    while (hull.size() > 1 && slope(row, hull.back()) >= slope(hull.back(), hull.end()[-2])) {
      hull.pop_back();
    }
    slopes[row] = slope(row, hull.back());
    hull.push_back(row);
  }
  return slopes;
}

// See _grow_what_may_pay.
void grow_what_may_pay(const Source& source, int64_t ranks, const Price& price, Offer& offer) {
  const int64_t num_reqs = source.batch;
  const int64_t num_rows = std::min(price.num_rows, 1 + num_reqs * (1 + offer.nodes));
  const std::vector<double> slopes = least_slopes(price.seconds, num_rows);
  const int64_t max_rows = num_rows - 1, plain_rows = std::min(num_reqs, max_rows);
  const double plain_rate = double(num_reqs) / price.seconds[plain_rows] / price.trust;
  const auto begin = slopes.begin() + plain_rows;
  double slope = *std::min_element(begin, begin + std::min(NEXT_ROWS, num_rows - plain_rows));
  while (true) {
    const int64_t num_grown = grow(source, ranks, plain_rate * slope, offer);
    const double next_slope = slopes[std::min(num_reqs + num_grown, max_rows)];
    if (!(next_slope < slope)) return;
    slope = next_slope;
  }
}

// Parents, ranks and depths are of the rows of a template; parents come before children.
void fill(const Source& source, const int64_t* parents, const int64_t* ranks,
          const int64_t* depths, Offer& offer) {
  struct Row {
    Context context;
    Address address;
    double worth;
    bool is_filled, is_found;
  };
  std::vector<Row> rows(offer.nodes + 1);
  for (int64_t b = 0; b < source.batch; b++) {
    rows[0] = {source.ends.tail(b, source.matrix.reach()), {}, 1.0, true, false};
    for (int64_t row = 1; row <= offer.nodes; row++) {
      const int64_t node = b * offer.nodes + row - 1, rank = ranks[row];
      offer.parents[node] = parents[row];
      rows[row].is_filled = rows[row].is_found = false;
      Row& parent = rows[parents[row]];
      if (!parent.is_filled || depths[row] > source.max_depths[b]) continue;
      if (!parent.is_found) parent.address = source.find(parent.context, b), parent.is_found = true;
      if (!parent.address.entry || parent.address.entry[1 + rank] < 0) continue;
      const int64_t token = offer.token_ids[node] = parent.address.entry[1 + rank];
      const double worth = parent.worth * source.rates_of(parent.address, b)[rank * STEADINESSES];
      offer.worths[node] = worth;
      rows[row] = {parent.context.below(token), {}, worth, true, false};
    }
  }
}

// Nodes of a request that are taken together.
struct Block {
  double worth;
  int64_t size, request;

  double average() const { return worth / double(size); }
};

// See choose.choose.
void choose(const Price& price, int64_t batch, Offer& offer) {
  std::vector<Block> blocks;
  for (int64_t b = 0; b < batch; b++) {
    const size_t first_block = blocks.size();
    for (int64_t node = 0; node < offer.nodes; node++) {
      Block block = {offer.worths[b * offer.nodes + node], 1, b};
      while (blocks.size() > first_block &&
             blocks.back().worth * double(block.size) < block.worth * double(blocks.back().size)) {
        block.worth = blocks.back().worth + block.worth;
        block.size += blocks.back().size;
        blocks.pop_back();
      }
      blocks.push_back(block);
    }
    while (blocks.size() > first_block && blocks.back().worth <= 0.0) blocks.pop_back();
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
    return a.average() > b.average();
  });
  int64_t rows = batch;
  double total = double(rows), expected = 0.0;
  offer.rate = total / price.seconds[std::min(rows, price.num_rows - 1)];
  size_t num_taken = 0;
  for (size_t i = 0; i < blocks.size(); i++) {
    total += price.trust * blocks[i].worth, rows += blocks[i].size;
    if (rows >= price.num_rows) break;
    if (total / price.seconds[rows] > offer.rate) {
      offer.rate = total / price.seconds[rows], num_taken = i + 1;
    }
  }
  for (size_t i = 0; i < num_taken; i++) {
    offer.sizes[blocks[i].request] += blocks[i].size;
    expected += blocks[i].worth;
  }
  offer.expected = expected;
}

// What there is to draft for, as the caller has it; see draft.draft.
struct Texts {
  const int64_t* idx_mapping;
  const int32_t* token_ids;
  const uint8_t* is_token;
  int64_t stride;
  const int64_t *last_positions, *max_depths, *trunk_ids;
  const double* chances;
  int64_t gamma, choices;
  const int64_t* follows;
  void (*ask)(int64_t, const int64_t*, int64_t, Allowed*);
  int64_t batch;
};

struct Template {
  const int64_t *parents, *ranks, *depths;
  int64_t nodes;  // 0 to grow trees
};

// What was chosen beside tokens and parents.
struct Chosen {
  double rate, expected;
  int64_t kind;
};

}  // namespace

extern "C" {

// Writes of each text the size of its draft, its tokens, and their parents; returns how many
// numbers these are.
int64_t draft(const Matrix* matrix, const double* counts, const Texts* texts, const Template* tree,
              const Price* trees, const Price* chains, int64_t max_nodes, int64_t* drafts,
              Chosen* chosen) {
  const Source source = {*matrix, texts->idx_mapping,
                         {texts->token_ids, texts->is_token, texts->stride, texts->last_positions},
                         texts->max_depths,
                         {texts->trunk_ids, texts->chances, texts->gamma, texts->choices},
                         {texts->follows, texts->ask}, texts->batch,
                         find_rates(counts, NUM_CLASSES * matrix->num_ranks())};
  std::vector<Offer> offers;
  auto offer = [&](int64_t nodes, int64_t ranks, const Price& price) {
    Offer& result = offers.emplace_back(source.batch, std::min(nodes, max_nodes), &price == chains);
    if (ranks) grow_what_may_pay(source, ranks, price, result);
    else fill(source, tree->parents, tree->ranks, tree->depths, result);
    choose(price, source.batch, result);
  };
  if (trees->seconds && tree->nodes) offer(tree->nodes, 0, *trees);
  else if (trees->seconds) offer(max_nodes, ALL_RANKS, *trees);
  if (chains->seconds) offer(MAX_CHAIN, 1, *chains);
  const Offer& best = offers.size() > 1 && offers[1].rate > offers[0].rate ? offers[1] : offers[0];
  *chosen = {best.rate, best.expected, best.kind};
  int64_t* out = drafts;
  for (int64_t b = 0; b < source.batch; b++) {
    const int64_t first_node = b * best.nodes, size = best.sizes[b];
    *out++ = size;
    out = std::copy_n(best.token_ids.data() + first_node, size, out);
    out = std::copy_n(best.parents.data() + first_node, size, out);
  }
  return out - drafts;
}

// All is read before anything is written; of several writes to an entry the last one stays.
void learn(const Matrix* ref, double* counts, const int64_t* idx_mapping,
           const int32_t* text_ids, const uint8_t* is_token, int64_t stride,
           const int64_t* last_positions, const int64_t* parents, int64_t parents_stride,
           const int64_t* row_token_ids, const int64_t* cu_num_logits, const int32_t* successors,
           const int64_t* path, const int64_t* token_ids, int64_t path_length, int64_t batch) {
  const Matrix& matrix = *ref;
  const Ends ends = {text_ids, is_token, stride, last_positions};
  const int64_t num_cells = matrix.num_ranks() * CELLS * 2;  // of a class
  std::vector<double> increments(counts ? NUM_COUNTED * num_cells : 0);
  std::vector<Context> contexts;
  std::vector<uint8_t> visited;
  std::vector<Write> writes;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t first_row = cu_num_logits[b], rows = cu_num_logits[b + 1] - first_row;
    const int64_t salt = matrix.salts[idx_mapping[b]];
    if (!rows) continue;
    contexts.assign(rows, no_context());  // where a node was not filled
    visited.assign(rows, 0);
    contexts[0] = ends.tail(b, matrix.reach());
    for (int64_t row = 1; row < rows; row++) {
      const int64_t parent = parents[b * parents_stride + row];
      const bool is_below = parent == 0 || contexts[parent].tokens[0] >= 0;
      const int64_t token = row_token_ids[first_row + row];
      if (is_below && token >= 0) contexts[row] = contexts[parent].below(token);
    }
    const int64_t *visits = path + b * path_length, *emitted = token_ids + b * path_length;
    int64_t num_visits = 0;
    for (; num_visits < path_length && visits[num_visits] >= 0; num_visits++) {
      const int64_t row = visits[num_visits];
      visited[row] = 1;
      const int64_t request_class = matrix.classes[idx_mapping[b]], token = emitted[num_visits];
      if (!counts || request_class >= NUM_COUNTED) continue;
      count(matrix, increments.data() + request_class * num_cells, contexts[row], salt, token);
    }
    auto write = [&](int64_t row) {
      each_address(matrix, contexts[row], salt, [&](const Address& address) {
        writes.push_back(write_to(address, successors + (first_row + row) * matrix.k));
      });
    };
    for (int64_t row = 0; row < rows; row++) {
      if (!visited[row]) write(row);
    }
    for (int64_t i = 0; i < num_visits; i++) write(visits[i]);
  }
  for (const Write& write : writes) apply(matrix, write);
  if (counts) fold(counts, increments);
}

// A slice of the text after the other; each as `learn` does a step.
void seed(const Matrix* ref, const int64_t* tokens, int64_t num_tokens, int64_t req_state_idx) {
  const Matrix& matrix = *ref;
  const int64_t k = matrix.k, salt = matrix.salts[req_state_idx];
  Context context = no_context();
  std::vector<int32_t> merged(SLICE * matrix.num_contexts * k);
  std::vector<Write> writes;
  for (int64_t end = 1; end < num_tokens; end++) {
    context = context.below(tokens[end - 1]);
    const int32_t* known_successors[MAX_REACH] = {};
    each_address(matrix, context, salt, [&](const Address& address) {
      if (address.is_known()) known_successors[address.index] = address.entry + 1;
    });
    const int32_t follower = int32_t(tokens[end]);
    each_address(matrix, context, salt, [&](const Address& address) {
      if (address.own != matrix.has_own || !matrix.is_token(tokens[end])) return;
      int32_t* out = merged.data() + int64_t(writes.size()) * k;
      const int32_t* successors = known_successors[known_successors[address.index] ? address.index : 0];
      int64_t size = 0;
      out[size++] = follower;
      for (int64_t rank = 0; successors && rank < k && size < k; rank++) {
        if (successors[rank] != follower && successors[rank] >= 0) out[size++] = successors[rank];
      }
      std::fill(out + size, out + k, -1);
      writes.push_back(write_to(address, out));
    });
    if (end % SLICE && end + 1 < num_tokens) continue;
    for (const Write& write : writes) apply(matrix, write);
    writes.clear();
  }
}

void top_k_rows(const void* logits, int64_t count, int64_t stride, int64_t num_logits, int64_t k,
                int64_t is_bf16, int64_t threads, int32_t* best, int64_t* first) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > 1)
  for (int64_t row = 0; row < count; row++) {
    top_k(logits, row * stride, is_bf16, num_logits, k, best + row * k);
    first[row] = std::max(best[row * k], 0);
  }
}

}  // extern "C"
