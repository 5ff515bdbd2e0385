// Replays cases that run_emulated.py wrote: attention against expected values, page closing against expected bytes.
// Needs nothing but the library, so that it runs on an emulated machine.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "../../src/kvbits/ops/cpu/csrc/kvbits_cpu.h"

static FILE* file;

template <class T>
static T read_one() {
  T x;
  if (fread(&x, sizeof x, 1, file) != 1) exit(2);
  return x;
}

struct Blob {
  char* data;
  int64_t size;
  template <class T>
  T* as() const { return size ? reinterpret_cast<T*>(data) : nullptr; }
};

static Blob read_blob() {
  Blob b;
  b.size = read_one<int64_t>();
  b.data = static_cast<char*>(aligned_alloc(64, (b.size / 64 + 1) * 64));
  if (b.size && fread(b.data, 1, b.size, file) != static_cast<size_t>(b.size)) exit(2);
  return b;
}

struct Store {
  kvbits_store s;
  int64_t address, pages;
  Blob slab;
};

static Store* read_store() {
  Store* store = new Store();
  store->s.key = *read_blob().as<kvbits_tensor>();
  store->s.value = *read_blob().as<kvbits_tensor>();
  for (kvbits_tensor* t : {&store->s.key, &store->s.value})
    for (const float** p : {&t->static_scale, &t->static_bias, &t->inv_freq}) *p = read_blob().as<float>();
  store->s.page_size = read_one<int64_t>();
  store->s.head_bytes = read_one<int64_t>();
  store->s.page_stride = read_one<int64_t>();
  store->slab = read_blob();
  store->address = reinterpret_cast<int64_t>(store->slab.data);
  store->pages = store->slab.size / store->s.page_stride;
  store->s.num_slabs = 1;
  store->s.slab_address = &store->address;
  store->s.slab_pages = &store->pages;
  return store;
}

static bool attend() {
  kvbits_attend_call call = {};
  call.batch = read_one<int64_t>();
  call.num_tokens = read_one<int64_t>();
  call.num_heads = read_one<int64_t>();
  call.num_kv_heads = read_one<int64_t>();
  call.head_dim = call.value_head_dim = read_one<int64_t>();
  call.q_dtype = read_one<int64_t>();
  call.sliding_window = read_one<int64_t>();
  call.num_parts = read_one<int64_t>();
  call.scaling = read_one<double>();
  call.softcap = read_one<double>();
  const double tolerance = read_one<double>();
  call.q = read_blob().data;
  call.q_stride[2] = call.head_dim;
  call.q_stride[1] = call.num_heads * call.q_stride[2];
  call.q_stride[0] = call.num_tokens * call.q_stride[1];
  call.q_positions = read_blob().as<int64_t>();
  const Blob want = read_blob(), want_lse = read_blob();
  std::vector<kvbits_part> parts;
  for (int p = 0; p < call.num_parts; p++) {
    Store* store = read_store();
    kvbits_table* table = new kvbits_table();
    table->indptr = read_blob().as<int64_t>();
    const Blob ids = read_blob();
    table->num_entries = ids.size / 8;
    table->page_ids = ids.as<int64_t>();
    table->starts = read_blob().as<int64_t>();
    table->lengths = read_blob().as<int32_t>();
    parts.push_back({&store->s, table});
  }
  call.parts = parts.data();
  call.num_threads = 2;
  std::vector<float> out(want.size / 4), lse(want_lse.size / 4);
  call.out = out.data();
  call.lse = lse.data();
  if (const int code = kvbits_attend(&call)) return printf("  attend: %s\n", kvbits_error(code)), false;
  double wrong = 0, norm = 0;
  for (size_t i = 0; i < out.size(); i++) {
    wrong += pow(out[i] - want.as<float>()[i], 2);
    norm += pow(want.as<float>()[i], 2);
  }
  bool right = sqrt(wrong) <= tolerance * sqrt(norm);
  for (size_t i = 0; i < lse.size(); i++) {
    const float w = want_lse.as<float>()[i];
    right &= isinf(w) ? isinf(lse[i]) : fabsf(lse[i] - w) <= fmax(2 * tolerance, 1e-5);
  }
  if (!right) printf("  attend: relative error %g, allowed %g\n", sqrt(wrong / norm), tolerance);
  return right;
}

static bool close_pages() {
  Store* store = read_store();
  kvbits_close_call call = {};
  call.store = &store->s;
  call.num_kv_heads = read_one<int64_t>();
  call.head_dim = call.value_head_dim = read_one<int64_t>();
  call.dtype = read_one<int64_t>();
  const Blob k = read_blob(), v = read_blob();
  const Blob want = read_blob();
  call.num_pages = store->pages;
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < store->pages; i++) ids.push_back(i);
  call.page_ids = ids.data();
  call.num_threads = 2;
  for (int i = 0; i < 2; i++) {
    call.source[i] = i ? v.data : k.data;
    call.stride[i][2] = call.head_dim;
    call.stride[i][1] = call.stride[i][2] * store->s.page_size;
    call.stride[i][0] = call.stride[i][1] * call.num_kv_heads;
  }
  if (const int code = kvbits_close(&call)) return printf("  close: %s\n", kvbits_error(code)), false;
  const bool right = !memcmp(store->slab.data, want.data, want.size);
  if (!right) printf("  close: bytes differ\n");
  return right;
}

int main(int count, char** argv) {
  file = fopen(argv[1], "rb");
  if (!file) return 2;
  if (count > 2 && strcmp(kvbits_tier(), argv[2])) return printf("%s was chosen, not %s\n", kvbits_tier(), argv[2]), 1;
  int passed = 0, failed = 0;
  for (int64_t kind; (kind = read_one<int64_t>()) != 0;) (kind == 1 ? attend() : close_pages()) ? passed++ : failed++;
  printf("%s: %d passed, %d failed\n", kvbits_tier(), passed, failed);
  return failed != 0;
}
