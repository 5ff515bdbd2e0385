// Products of two tiles of rows and two tiles of columns, square by square, so that other work can be done in between:
// the tiles multiply while the vectors' instructions compute.
#pragma once
#include "registers.h"

namespace {

// One step along the depth. A tile that is loaded serves two products, so that the L2 cache keeps up with them.
struct Square {
  const uint16_t *first, *second, *columns;  // A of both tiles of rows; B
  float *sums, *second_sums;                 // of both, two column tiles each
  bool begins, gains, ends;                  // gains: sums begin as what is there, not as 0
};

// Where the tiles of one factor lie: terms, then steps along the depth.
struct Factor {
  const uint16_t* tiles;
  int64_t term_apart, step_apart;
  int terms;
};

// Squares that are to be done, in their order.
struct Squares {
  static constexpr int ROOM = 256;
  int count, done;
  Square list[ROOM];

  MEMBER void step() {
    const Square& s = list[done++];
    if (s.begins && s.gains) {
      load_tile<0>(s.sums);
      load_tile<1>(s.sums + TILE_SUMS);
      load_tile<2>(s.second_sums);
      load_tile<3>(s.second_sums + TILE_SUMS);
    } else if (s.begins) {
      clear_tile<0>();
      clear_tile<1>();
      clear_tile<2>();
      clear_tile<3>();
    }
    load_tile<4>(s.first);
    load_tile<6>(s.columns);
    add_product<0, 4, 6>();
    load_tile<7>(s.columns + TILE_NUMBERS);
    add_product<1, 4, 7>();
    load_tile<5>(s.second);
    add_product<2, 5, 6>();
    add_product<3, 5, 7>();
    if (s.ends) {
      store_tile<0>(s.sums);
      store_tile<1>(s.sums + TILE_SUMS);
      store_tile<2>(s.second_sums);
      store_tile<3>(s.second_sums + TILE_SUMS);
    }
  }

  void finish() {
    while (done < count) step();
    count = done = 0;
  }

  // An even number of column tiles, which lie side by side, of two tiles of rows: their sums gain A times B of a depth
  // of `steps`, or become it, over the terms whose product is not below their error. What the rows and sums of the
  // second tile are apart from the first one's.
  void add(const Factor& a, int64_t rows_apart, const Factor& b, int steps, int column_tiles, float* to,
           int64_t sums_apart, bool gains) {
    for (int j = 0; j < column_tiles; j += 2) {
      bool begins = true;
      for (int i = 0; i < a.terms; i++)
        for (int k = 0; k < b.terms && i + k < 2; k++)
          for (int step = 0; step < steps; step++) {
            if (count == ROOM) finish();
            const uint16_t* rows = a.tiles + i * a.term_apart + step * a.step_apart;
            Square& s = list[count++];
            s.first = rows, s.second = rows + rows_apart;
            s.columns = b.tiles + k * b.term_apart + step * b.step_apart + j * TILE_NUMBERS;
            s.sums = to + j * TILE_SUMS, s.second_sums = s.sums + sums_apart;
            s.begins = begins, s.gains = gains, s.ends = false;
            begins = false;
          }
      list[count - 1].ends = true;
    }
  }
};

// Does a number of squares evenly among `slots`.
struct Pace {
  Squares& squares;
  int owed = 0, each, slots;

  Pace(Squares& s, int n) : squares(s), each(s.count - s.done), slots(n) {}
  MEMBER void tick() {
    for (owed += each; owed >= slots; owed -= slots)
      if (squares.done < squares.count) squares.step();
  }
};

}  // namespace
