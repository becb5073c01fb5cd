//! Tests of the layout of packed weights, place by place.

use super::{Packing, SPAN, Stack, TILE, greatest_of, lane_word, operand_index};
use half::f16;
use nq_formats::{Tensor, Weight};

/// In product j of a chunk, lane t has inputs 8t + 4j ..: two at 2t, two at 8 + 2t
/// (`mma_16816`).
#[test]
fn operand_order_is_that_of_the_products() {
    for chunk in 0..SPAN / 32 {
        for (j, t, i) in
            (0..2).flat_map(|j| (0..4).flat_map(move |t| (0..4).map(move |i| (j, t, i))))
        {
            let k = chunk * 32 + 8 * t + 4 * j + i;
            let at = chunk * 32 + 16 * j + i / 2 * 8 + 2 * t + i % 2;
            assert_eq!(operand_index(k), at, "input {k}");
        }
    }
}

#[test]
fn lane_word_is_the_documented_order() {
    let shifts = [0, 16, 8, 24, 4, 20, 12, 28];
    for w in [0x7654_3210u32, 0xfedc_ba98, 0x1234_5678, 0xffff_0000] {
        let out = lane_word(w);
        for (i, shift) in shifts.iter().enumerate() {
            assert_eq!(out >> shift & 15, w >> (4 * i) & 15, "code {i} of {w:x}");
        }
    }
}

/// Input 32c + 8t + 4j + i of row g (upper: 8 + g) is half i % 2 of word i / 2 * 2 + upper of
/// lane 4g + t of product 2c + j (`cuda/weights.cuh`).
#[test]
fn halves_lie_where_the_products_read_them() {
    let (rows, cols) = (21, 300);
    let values: Vec<f32> = (0..rows * cols)
        .map(|i| (i % 1999) as f32 - 999.0)
        .collect();
    let tensor = Tensor::from_f32(vec![rows, cols], values.clone()).unwrap();
    let weight = Weight::Dense(tensor);
    let packing = Packing::new(&[&weight], Stack::Concat).unwrap();
    let mut codes = vec![0xff; packing.tiles() * packing.spans() * packing.kind().code_bytes()];
    packing.pack(0, &mut codes, &mut []).unwrap();
    let spans = packing.spans();
    for row in 0..packing.tiles() * TILE {
        for col in 0..spans * SPAN {
            let (c, t, j) = (col % SPAN / 32, col % 32 / 8, col % 8 / 4);
            let (i, g, upper) = (col % 4, row % 8, row % TILE / 8);
            let record = (row / TILE * spans + col / SPAN) * TILE * SPAN * 2;
            let word = ((2 * c + j) * 32 + 4 * g + t) * 4 + i / 2 * 2 + upper;
            let at = record + word * 4 + i % 2 * 2;
            let found = f16::from_le_bytes([codes[at], codes[at + 1]]).to_f32();
            let inside = row < rows && col < cols;
            let expected = if inside {
                values[row * cols + col]
            } else {
                0.0
            };
            assert_eq!(found * packing.scale(), expected, "row {row}, input {col}");
        }
    }
}

#[test]
fn the_greatest_is_found_wherever_it_is() {
    for n in [1, 4096, 4097, 9000, (1 << 20) + 5] {
        for at in [0, n / 2, n - 1] {
            let mut values = vec![0.5f32; n];
            values[at] = -3.0;
            values[n / 3] = if n / 3 == at { -3.0 } else { f32::NAN };
            let tensor = Tensor::from_f32(vec![n], values).unwrap();
            assert_eq!(greatest_of(&tensor).unwrap(), 3.0, "{at} of {n}");
        }
    }
}
