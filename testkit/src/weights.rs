//! Random weights of every kind, the same for the same seed.

use bytes::Bytes;
use half::{bf16, f16};
use nq_formats::pack::pack_rows;
use nq_formats::trellis::STRIP;
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Exl3Code, Exl3Scheme, Exl3Weight, Group, GroupValues, Levels,
    Parts, QuantizedWeight, Scales, Tensor, TrellisScheme, TrellisWeight, TwoLevel, Weight, Zeros,
};
use nq_kernels::rng::Philox;
use nq_model::{DType, Dims};

/// Normal values.
pub fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Philox::new(seed, 7);
    (0..n).map(|_| rng.normal()).collect()
}

/// A dense weight of normal values.
pub fn dense(dtype: DType, out: usize, inp: usize, seed: u64) -> Weight {
    let values = normal(out * inp, seed).into_iter().map(|v| v * 0.1);
    let data: Vec<u8> = match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values
            .flat_map(|v| f16::from_f32(v).to_le_bytes())
            .collect(),
        DType::BF16 => values
            .flat_map(|v| bf16::from_f32(v).to_le_bytes())
            .collect(),
        other => panic!("no test weights of {other}"),
    };
    Weight::Dense(Tensor::new(dtype, vec![out, inp], data.into()).unwrap())
}

/// A quantized weight with random codes, scales and zero-points.
pub fn affine(
    scheme: AffineScheme,
    out: usize,
    inp: usize,
    g_idx: Option<Vec<u32>>,
    seed: u64,
) -> Weight {
    let mut rng = Philox::new(seed, 11);
    let groups = scheme.group.count(inp);
    let mut packed = |bits: Bits, n: usize| -> Bytes {
        let codes: Vec<u8> = (0..out * n)
            .map(|_| rng.next_u32() as u8 & bits.max_code())
            .collect();
        pack_rows(bits, &codes, n).into()
    };
    let codes = packed(scheme.bits, inp);
    let zeros = packed(scheme.value_bits(), groups);
    let levels = packed(Bits::B8, 1 << scheme.bits.width());
    let mut values = |least: f32, range: f32| match scheme.scales {
        Scales::Half => {
            let value = |_| f16::from_f32(least + range * rng.uniform());
            GroupValues::Half((0..out * groups).map(value).collect())
        }
        Scales::TwoLevel(two) => {
            let value = |_| f16::from_f32((least + range * rng.uniform()) / 32.0);
            let of_spans = (0..out * two.span.count(inp)).map(value).collect();
            let small = (0..out * groups).map(|_| rng.next_u32() as u8 & two.bits.max_code());
            let small = pack_rows(two.bits, &small.collect::<Vec<u8>>(), groups).into();
            GroupValues::TwoLevel { small, of_spans }
        }
    };
    let parts = Parts {
        codes,
        scales: values(0.005, 0.02),
        zeros: (scheme.zeros == Zeros::Integer).then_some(zeros),
        offsets: (scheme.zeros == Zeros::Offset).then(|| values(0.0, -0.1)),
        levels: (scheme.levels == Levels::Table).then(|| levels[..1 << scheme.bits.width()].into()),
        g_idx: g_idx.map(Into::into),
    };
    let weight = AffineWeight::assemble(scheme, Dims::new(out, inp), parts);
    Weight::Quantized(QuantizedWeight::Affine(weight.unwrap()))
}

/// A seeded assignment of inputs to groups of `group`, as in activation order.
pub fn shuffled_groups(inp: usize, group: usize, seed: u64) -> Vec<u32> {
    let mut rng = Philox::new(seed, 13);
    let mut g: Vec<u32> = (0..inp).map(|i| (i / group) as u32).collect();
    for i in (1..inp).rev() {
        g.swap(i, rng.next_u32() as usize % (i + 1));
    }
    g
}

/// A weight in a trellis code with random words; its input scales, of the seed `inputs`, are powers of two of either
/// sign.
pub fn trellis(scheme: TrellisScheme, dims: Dims, seed: u64, inputs: u64) -> Weight {
    let (out, inp) = dims.pair();
    let mut rng = Philox::new(seed, 17);
    let bytes = out.div_ceil(STRIP) * scheme.strip_bytes(inp);
    let words = (0..bytes / 4).flat_map(|_| rng.next_u32().to_le_bytes());
    let words: Vec<u8> = words.collect();
    let scale = |v: f32| f16::from_f32(0.02 + 0.005 * v);
    let row_scales = normal(out, seed).into_iter().map(scale).collect();
    let mut rng = Philox::new(inputs, 19);
    let mut input_scale = || [0.5, 1.0, 2.0, -0.5, -1.0, -2.0][rng.next_u32() as usize % 6];
    let input_scales = (0..inp).map(|_| f16::from_f32(input_scale())).collect();
    let weight = TrellisWeight::new(
        scheme,
        Dims::new(out, inp),
        words.into(),
        row_scales,
        input_scales,
    );
    Weight::Quantized(QuantizedWeight::Trellis(weight.unwrap()))
}

/// A weight in an EXL3 code with random tiles; its scales of inputs, of the seed `inputs`, are powers of two of either sign.
pub fn exl3(scheme: Exl3Scheme, dims: Dims, seed: u64, inputs: u64) -> Weight {
    let mut rng = Philox::new(seed, 23);
    let words = dims.rows * dims.cols / 256 * scheme.tile_bytes() / 4;
    let tiles: Vec<u8> = (0..words)
        .flat_map(|_| rng.next_u32().to_le_bytes())
        .collect();
    let output_scales = normal(dims.rows, seed)
        .into_iter()
        .map(|v| f16::from_f32(0.02 + 0.005 * v));
    let mut rng = Philox::new(inputs, 19);
    let mut input_scale = || [0.5, 1.0, 2.0, -0.5, -1.0, -2.0][rng.next_u32() as usize % 6];
    let input_scales = (0..dims.cols).map(|_| f16::from_f32(input_scale()));
    let weight = Exl3Weight::new(
        scheme,
        dims,
        tiles.into(),
        input_scales.collect(),
        output_scales.collect(),
    );
    Weight::Quantized(QuantizedWeight::Exl3(weight.unwrap()))
}

/// The EXL3 schemes that kernels read: every code, of 2 to 8 bits.
pub fn exl3_schemes() -> impl Iterator<Item = Exl3Scheme> {
    let of_code = |code| (2..=8).filter_map(move |bits| Exl3Scheme::new(code, 2 * bits));
    Exl3Code::ALL.into_iter().flat_map(of_code)
}

/// All schemes with these groups.
pub fn schemes(groups: &[Group]) -> Vec<AffineScheme> {
    let mut all = Vec::new();
    for bits in [Bits::B4, Bits::B8] {
        for &group in groups {
            for zeros in [Zeros::None, Zeros::Integer, Zeros::Offset] {
                all.push(AffineScheme::new(bits, group, zeros));
            }
        }
    }
    all
}

/// Schemes with scales in two levels that GPUs hold as they are.
pub fn two_level(groups: &[Group]) -> Vec<AffineScheme> {
    let kinds = [
        (Bits::B4, Zeros::Integer),
        (Bits::B5, Zeros::Integer),
        (Bits::B6, Zeros::None),
    ];
    let schemes = |&group| {
        kinds.map(|(bits, zeros)| AffineScheme::new(bits, group, zeros).two_level(Bits::B8))
    };
    groups.iter().flat_map(schemes).collect()
}

/// Schemes of GGUF's blocks that GPUs hold in kinds of their own: Q4_K, Q6_K, Q5_K, Q3_K, IQ4_XS, IQ2_XXS, NVFP4 and
/// Q2_K.
pub fn blocks() -> Vec<AffineScheme> {
    let scheme = |bits, group, zeros, of_scales| {
        let span = Group::Size(256);
        AffineScheme {
            scales: Scales::TwoLevel(TwoLevel {
                bits: of_scales,
                span,
            }),
            ..AffineScheme::new(bits, Group::Size(group), zeros)
        }
    };
    vec![
        scheme(Bits::B4, 32, Zeros::Offset, Bits::B6),
        scheme(Bits::B6, 16, Zeros::None, Bits::B8),
        scheme(Bits::B5, 32, Zeros::Offset, Bits::B6),
        scheme(Bits::B3, 16, Zeros::None, Bits::B8),
        scheme(Bits::B4, 32, Zeros::None, Bits::B8).with_table(),
        scheme(Bits::B3, 32, Zeros::None, Bits::B8).with_table(),
        AffineScheme::new(Bits::B4, Group::Size(16), Zeros::None).with_table(),
        scheme(Bits::B2, 16, Zeros::Offset, Bits::B6),
    ]
}

/// Schemes that devices hold as other schemes: every width, kind of scale and table at least once.
pub fn held_as_others(group: Group) -> Vec<AffineScheme> {
    let scheme = |bits, zeros| AffineScheme::new(bits, group, zeros);
    vec![
        scheme(Bits::B3, Zeros::None),
        scheme(Bits::B3, Zeros::Integer).two_level(Bits::B6),
        scheme(Bits::B3, Zeros::Offset).with_table(),
        scheme(Bits::B4, Zeros::Integer).two_level(Bits::B8),
        scheme(Bits::B4, Zeros::Offset).two_level(Bits::B4),
        scheme(Bits::B4, Zeros::None)
            .two_level(Bits::B6)
            .with_table(),
        scheme(Bits::B5, Zeros::Integer).two_level(Bits::B8),
        scheme(Bits::B5, Zeros::Integer).with_table(),
        scheme(Bits::B6, Zeros::None).two_level(Bits::B8),
        scheme(Bits::B6, Zeros::Offset),
        scheme(Bits::B8, Zeros::None).two_level(Bits::B5),
    ]
}
