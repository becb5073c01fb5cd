//! Tests of the layout of packed weights, place by place.

use super::{PackedKind, Packing, SPAN, Stack, TILE, greatest_of, lane_word, operand_index};
use half::f16;
use nq_formats::gguf::BlockType;
use nq_formats::pack::pack_rows;
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Group, GroupValues, Parts, QuantizedWeight, Tensor, Weight,
    Zeros,
};
use nq_kernels::registry::WeightKind;
use nq_model::Dims;
use nq_testkit::weights::{affine, blocks};

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
    let packing = Packing::new(&[&weight], Stack::Concat, false).unwrap();
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

/// Parts that no kind of integers holds, in groups of 16 or activation order, become the halves of their values.
#[test]
fn what_no_kernel_reads_is_held_as_halves() {
    let (rows, cols) = (24, 320);
    let weight = |bits: Bits, group: usize, act_order: bool| {
        let codes: Vec<u8> = (0..rows * cols)
            .map(|i| (i * 7 % 251) as u8 & bits.max_code())
            .collect();
        let scales = (0..rows * cols / group).map(|i| f16::from_f32((i % 13 + 1) as f32 * 1e-3));
        let parts = Parts {
            codes: pack_rows(bits, &codes, cols).into(),
            scales: GroupValues::Half(scales.collect()),
            zeros: None,
            offsets: None,
            levels: None,
            g_idx: act_order.then(|| (0..cols).map(|i| (i % (cols / group)) as u32).collect()),
        };
        let scheme = AffineScheme::new(bits, Group::Size(group as u32), Zeros::None);
        let affine = AffineWeight::assemble(scheme, Dims::new(rows, cols), parts).unwrap();
        Weight::Quantized(QuantizedWeight::Affine(affine))
    };
    let dense = |w: &Weight| {
        let mut values = vec![0f32; rows * cols];
        for (row, values) in values.chunks_exact_mut(cols).enumerate() {
            w.dequantize_row(row, values).unwrap();
        }
        Weight::Dense(Tensor::from_f32(vec![rows, cols], values).unwrap())
    };
    let packed = |parts: &[&Weight], stack| {
        let packing = Packing::new(parts, stack, false).unwrap();
        assert_eq!(packing.kind(), PackedKind::Fp16);
        let mut codes = vec![0; packing.tiles() * packing.spans() * packing.kind().code_bytes()];
        packing.pack(0, &mut codes, &mut []).unwrap();
        (packing.scale(), codes)
    };
    let (int4, g16) = (weight(Bits::B4, 32, false), weight(Bits::B8, 16, false));
    let ordered = weight(Bits::B4, 32, true);
    for (parts, stack) in [
        (vec![&int4, &g16], Stack::Concat),
        (vec![&int4, &g16], Stack::Interleave),
        (vec![&g16], Stack::Concat),
        (vec![&ordered, &int4, &int4], Stack::Concat),
    ] {
        let values: Vec<Weight> = parts.iter().map(|w| dense(w)).collect();
        let expected = packed(&values.iter().collect::<Vec<_>>(), stack);
        assert!(packed(&parts, stack) == expected);
    }
    let alike = Packing::new(&[&int4, &int4], Stack::Concat, false).unwrap();
    assert_ne!(alike.kind(), PackedKind::Fp16);
}

/// Codes of 4, 5 and 6 bits with scales in two levels, read back by the documented layout, have the
/// weight's values, and what is past its end is zero.
#[test]
fn codes_and_scales_in_two_levels_lie_as_documented() {
    let mut state = 1u32;
    let mut random = |n: usize| -> Vec<u8> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..n).map(|_| next()).collect()
    };
    for (bits, zeros) in [
        (Bits::B4, Zeros::Integer),
        (Bits::B5, Zeros::Integer),
        (Bits::B6, Zeros::None),
    ] {
        for (rows, cols, group) in [(21, 300, 32), (16, 512, 64), (40, 1000, 128), (9, 24, 64)] {
            let scheme = AffineScheme::new(bits, Group::Size(group), zeros).two_level(Bits::B8);
            let in_row = scheme.group.count(cols);
            let mut packed = |n: usize| {
                let codes: Vec<u8> = random(rows * n)
                    .iter()
                    .map(|c| c & bits.max_code())
                    .collect();
                pack_rows(bits, &codes, n)
            };
            let (codes, points) = (packed(cols), packed(in_row));
            let of_rows = random(rows);
            let of_rows = of_rows.iter().map(|&v| f16::from_f32(f32::from(v) * 1e-5));
            let parts = Parts {
                codes: codes.into(),
                scales: GroupValues::TwoLevel {
                    small: random(rows * in_row).into(),
                    of_spans: of_rows.collect(),
                },
                zeros: (zeros == Zeros::Integer).then(|| points.into()),
                offsets: None,
                levels: None,
                g_idx: None,
            };
            let affine = AffineWeight::assemble(scheme, Dims::new(rows, cols), parts).unwrap();
            let weight = Weight::Quantized(QuantizedWeight::Affine(affine));
            let packing = Packing::new(&[&weight], Stack::Concat, false).unwrap();
            let kind = packing.kind();
            assert_eq!(kind.bits(), bits.width());
            let records = packing.tiles() * packing.spans();
            let mut codes = vec![0xff; records * kind.code_bytes()];
            let mut meta = vec![0xff; records * kind.meta_bytes()];
            packing.pack(0, &mut codes, &mut meta).unwrap();
            let mut expected = vec![0f32; cols];
            for row in 0..packing.tiles() * TILE {
                expected.fill(0.0);
                if row < rows {
                    weight.dequantize_row(row, &mut expected).unwrap();
                }
                for col in 0..packing.spans() * SPAN {
                    let record = row / TILE * packing.spans() + col / SPAN;
                    let codes = &codes[record * kind.code_bytes()..][..kind.code_bytes()];
                    let meta = &meta[record * kind.meta_bytes()..][..kind.meta_bytes()];
                    let found = value(kind, codes, meta, row % TILE, col % SPAN);
                    let value = expected.get(col).copied().unwrap_or(0.0);
                    // Past the end of a group that is not full, codes are zero and have its scale.
                    let past = cols..cols.next_multiple_of(SPAN / kind.groups());
                    assert!(
                        found == value || past.contains(&col),
                        "{scheme} {row} {col}"
                    );
                }
            }
        }
    }
}

/// Weight [row][col] of a record of integer codes (`cuda/weights.cuh`).
fn value(kind: PackedKind, codes: &[u8], meta: &[u8], row: usize, col: usize) -> f32 {
    let PackedKind::Affine {
        bits,
        zeros,
        groups,
        two_level,
        table,
    } = kind
    else {
        unreachable!("codes are integers")
    };
    let (g, upper, unit, chunk) = (row % 8, row / 8, col / 64, col % 64 / 32);
    let (lane, high, byte) = (g * 4 + col % 32 / 8, col % 8 / 4, [0, 2, 1, 3][col % 4]);
    let (nibble, j) = (4 * high + byte, chunk * 2 + upper);
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| codes[at + i]));
    let mut code;
    if bits == Bits::B2 {
        code = codes[unit * 256 + lane * 8 + j / 2 * 4 + byte] >> (j % 2 * 4 + high * 2) & 3;
    } else if bits == Bits::B3 {
        let low = word(unit * 384 + lane * 8 + j / 2 * 4) >> (4 * nibble + j % 2 * 2) & 3;
        let third = word(unit * 384 + 256 + lane * 4) >> (4 * nibble + j) & 1;
        code = (low | third << 2) as u8;
    } else if table {
        code = (word(unit * 512 + lane * 16 + j * 4) >> (4 * nibble) & 15) as u8;
    } else if bits == Bits::B8 && groups < 16 {
        code = codes[(col / 32 * 32 + lane) * 16 + high * 8 + upper * 4 + col % 4];
    } else {
        let width = bits.width() - 4;
        let codes = &codes[unit * (512 + width * 128)..];
        code = codes[lane * 16 + j * 4 + byte] >> (4 * high) & 15;
        for i in 0..width {
            // Bits above four, a word a lane and width.
            let bit = (2 * j + high) * width + i;
            let word = lane * width + bit / 8;
            code |= (codes[512 + word * 4 + byte] >> (bit % 8) & 1) << (4 + i);
        }
    }
    let half =
        |bytes: &[u8], at: usize| f16::from_le_bytes([bytes[at * 2], bytes[at * 2 + 1]]).to_f32();
    let signed = zeros == Zeros::None || groups == 16;
    let centred = signed && bits > Bits::B2;
    let (at, of_row) = (col * groups / SPAN * 8 + g, g * 2 + upper);
    let rows = if !two_level {
        0
    } else {
        32 + 32 * usize::from(zeros == Zeros::Offset)
    };
    let levels = &meta[rows..][..usize::from(table) << (bits.width() + 1)];
    let scales = &meta[rows + levels.len()..];
    let points = &scales[groups * if two_level { 16 } else { 32 }..];
    let product = |factor: f32, byte: f32| f16::from_f32(factor * byte).to_f32();
    let scale = match two_level {
        true => {
            let middle = if signed { 128.0 } else { 0.0 };
            product(
                half(meta, of_row),
                f32::from(scales[at * 2 + upper]) - middle,
            )
        }
        false => half(scales, at * 2 + upper),
    };
    let zero = match (zeros, bits) {
        (Zeros::Integer, Bits::B4) => points[at] >> (4 * upper) & 15,
        (Zeros::Integer, _) => points[at * 2 + upper],
        _ if centred => bits.midpoint(),
        _ => 0,
    };
    let offset = match zeros {
        Zeros::Offset if two_level => {
            let halves = groups == 16 && bits == Bits::B6;
            let at = if halves { at / 16 * 8 + g } else { at };
            product(half(meta, 16 + of_row), points[at * 2 + upper].into())
        }
        Zeros::Offset => half(points, at * 2 + upper),
        _ => 0.0,
    };
    if table {
        let level = levels[(upper << bits.width()) + usize::from(code)];
        return scale * f32::from(level as i8);
    }
    scale * (f32::from(code) - f32::from(zero)) + offset
}

/// Parts that differ are packed in the kind of the fewest bytes that has the values of all.
#[test]
fn parts_that_differ_share_a_kind() {
    let plain = |bits, group, zeros| AffineScheme::new(bits, Group::Size(group), zeros);
    let [int4, int8] = [Bits::B4, Bits::B8].map(|bits| plain(bits, 64, Zeros::None));
    let points = plain(Bits::B4, 128, Zeros::Integer);
    let offsets = plain(Bits::B4, 32, Zeros::Offset);
    let two_level = |bits, zeros| plain(bits, 64, zeros).two_level(Bits::B8);
    let mixed = [
        (Bits::B4, Zeros::Integer),
        (Bits::B5, Zeros::Integer),
        (Bits::B6, Zeros::None),
    ];
    let [mixed4, mixed5, mixed6] = mixed.map(|(bits, zeros)| two_level(bits, zeros));
    let [q4_k, q6_k, q5_k, q3_k, iq4_xs, iq2_xxs, nvfp4, q2_k] = blocks()[..] else {
        unreachable!("there are eight")
    };
    let of_rows = AffineScheme::new(Bits::B4, Group::Channel, Zeros::Integer).two_level(Bits::B8);
    for (schemes, bits) in [
        (vec![int4, int8], 8),
        (vec![int4, points], 4),
        (vec![points, int8, plain(Bits::B3, 32, Zeros::None)], 8),
        (vec![offsets, int8], 8),
        (vec![mixed4, mixed5], 5),
        (vec![mixed4, mixed6], 8),
        (vec![q4_k], 4),
        (vec![q6_k], 6),
        (vec![q5_k, q4_k], 5),
        (vec![q4_k, q4_k, q6_k], 6),
        (vec![q3_k], 3),
        (vec![q3_k, q5_k], 6),
        (vec![iq4_xs, iq4_xs], 4),
        (vec![iq2_xxs], 3),
        (vec![q3_k, iq2_xxs, iq2_xxs], 3),
        (vec![iq4_xs, iq2_xxs], 4),
        (vec![nvfp4, iq4_xs, int4], 4),
        (vec![q5_k, iq4_xs], 8),
        (vec![q2_k, q2_k], 2),
        (vec![q2_k, q3_k, q4_k], 8),
        (vec![q3_k, iq4_xs, q6_k], 8),
        (vec![of_rows, of_rows], 4),
        (vec![q4_k, int8], 8),
    ] {
        let (rows, cols) = (24, 600);
        let parts = schemes.iter().enumerate();
        let parts: Vec<Weight> = parts
            .map(|(i, s)| affine(*s, rows, cols, None, i as u64))
            .collect();
        let parts: Vec<&Weight> = parts.iter().collect();
        let packing = Packing::new(&parts, Stack::Concat, false).unwrap();
        let kind = packing.kind();
        assert_eq!(kind.bits(), bits, "{schemes:?}");
        // Scales stay in two levels where all have these, even if others took fewer bytes.
        let mixed = schemes.iter().all(|s| *s == of_rows);
        assert!(kind.is_two_level() || !mixed, "{schemes:?}");
        let records = packing.tiles() * packing.spans();
        let mut codes = vec![0xff; records * kind.code_bytes()];
        let mut meta = vec![0xff; records * kind.meta_bytes()];
        packing.pack(0, &mut codes, &mut meta).unwrap();
        let mut expected = vec![0f32; cols];
        for row in 0..packing.rows() {
            parts[row / rows]
                .dequantize_row(row % rows, &mut expected)
                .unwrap();
            for (col, expected) in expected.iter().enumerate() {
                let record = row / TILE * packing.spans() + col / SPAN;
                let codes = &codes[record * kind.code_bytes()..][..kind.code_bytes()];
                let meta = &meta[record * kind.meta_bytes()..][..kind.meta_bytes()];
                let found = value(kind, codes, meta, row % TILE, col % SPAN);
                assert_eq!(found, *expected, "{schemes:?} row {row}, input {col}");
            }
        }
    }
}

/// The manual's table of bits is that of the layouts.
#[test]
fn the_manual_says_how_many_bits_blocks_take() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/lab/performance.md");
    let page = std::fs::read_to_string(page).unwrap();
    let bits = |types: &[BlockType]| {
        let kinds = types.iter().map(|kind| {
            let scheme = kind.layout().unwrap().narrow_scheme(kind.elements());
            WeightKind::in_scheme(scheme.into(), false)
        });
        let kind = PackedKind::of_stack(kinds, 4096).unwrap();
        let bytes = kind.code_bytes() + kind.meta_bytes();
        let hundredths = (800.0 * bytes as f64 / (TILE * SPAN) as f64).round();
        format!("{:.2}", hundredths / 100.0)
    };
    let mut rows = 0;
    for line in page
        .lines()
        .filter(|l| l.starts_with("| ") && l.contains("bit"))
    {
        let mut cells = line.split('|').map(str::trim);
        let types: Vec<BlockType> = cells
            .nth(1)
            .map(|names| names.split(", ").filter_map(BlockType::from_name).collect())
            .unwrap_or_default();
        let last = cells.next_back().and(cells.next_back()).unwrap_or_default();
        let said: Vec<&str> = last.split(", ").collect();
        for (i, kind) in types.iter().enumerate() {
            let said = said.get(i).or(said.last()).unwrap();
            assert_eq!(bits(&[*kind]), *said, "{kind}");
            rows += 1;
        }
    }
    assert_eq!(rows, 16);
    let mixed = [
        (bits(&[BlockType::Q4_K, BlockType::Q6_K]), "Q3_K to Q6_K "),
        (
            bits(&[BlockType::Q2_K, BlockType::Q4_K]),
            "scales in two\nlevels ",
        ),
    ];
    for (bits, before) in mixed {
        assert!(page.contains(&format!("{before}{bits}")), "{before}{bits}");
    }
}

#[test]
fn the_greatest_is_found_wherever_it_is() {
    for (rows, inputs) in [(1, 1), (1, 4097), (90, 100), (1024, 1025)] {
        let n = rows * inputs;
        for at in [0, n / 2, n - 1] {
            let mut values = vec![0.5f32; n];
            values[at] = -3.0;
            values[n / 3] = if n / 3 == at { -3.0 } else { f32::NAN };
            let tensor = Tensor::from_f32(vec![rows, inputs], values).unwrap();
            let weight = Weight::Dense(tensor);
            assert_eq!(greatest_of(&weight).unwrap(), 3.0, "{at} of {n}");
        }
    }
}
