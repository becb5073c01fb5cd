//! Benches of products with trellis codes, and with those of EXL3, beside INT4.

use super::timing::{Scheme, Timing};
use nq_cuda::{
    CodedExperts, Columns, DeviceLinear, GemmOutput, GemvOutput, Norm, Stack, StreamOptions,
    TrellisRoom, TrellisSizes, Uploader,
};
use nq_formats::trellis::{Code, TrellisScheme, TrellisWeight};
use nq_formats::{Exl3Code, Exl3Scheme, Exl3Weight, QuantizedWeight, Weight};
use nq_kernels::Result;
use nq_model::Dims;

/// Products of Qwen3-8B and 0.6B: outputs, inputs, and whether they are gate and up.
const PRODUCTS: [(&str, usize, usize); 8] = [
    ("8b qkv", 6144, 4096),
    ("8b o", 4096, 4096),
    ("8b gate_up", 24576, 4096),
    ("8b down", 4096, 12288),
    ("0.6b qkv", 4096, 1024),
    ("0.6b o", 1024, 2048),
    ("0.6b gate_up", 6144, 1024),
    ("0.6b down", 1024, 3072),
];

/// An arbitrary weight.
pub(crate) fn weight(scheme: TrellisScheme, out: usize, inputs: usize) -> Weight {
    let bytes = scheme.strip_bytes(inputs) * out.div_ceil(128);
    let word = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9).rotate_left(13) as u8;
    let words: Vec<u8> = (0..bytes).map(word).collect();
    let half = half::f16::from_f32;
    let weight = TrellisWeight::new(
        scheme,
        Dims::new(out, inputs),
        words.into(),
        vec![half(0.01); out].into(),
        vec![half(1.0); inputs].into(),
    );
    Weight::Quantized(QuantizedWeight::Trellis(
        weight.expect("a weight of these sizes"),
    ))
}

/// An arbitrary weight in a code of EXL3.
pub(crate) fn exl3_weight(scheme: Exl3Scheme, out: usize, inputs: usize) -> Weight {
    let byte = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9).rotate_left(13) as u8;
    let tiles: Vec<u8> = (0..out / 16 * (inputs / 16) * scheme.tile_bytes())
        .map(byte)
        .collect();
    let scales = |value, n| vec![half::f16::from_f32(value); n].into();
    let dims = Dims::new(out, inputs);
    let weight = Exl3Weight::new(
        scheme,
        dims,
        tiles.into(),
        scales(1.0, inputs),
        scales(0.01, out),
    );
    Weight::Quantized(QuantizedWeight::Exl3(
        weight.expect("a weight of these sizes"),
    ))
}

/// Copies of a product's weight that are larger than the cache together.
fn copies(t: &Timing, product: &str, parts: &[Weight]) -> Result<Vec<DeviceLinear>> {
    let mut uploader = Uploader::new(&t.gpu)?;
    let parts: Vec<&Weight> = parts.iter().collect();
    let stack = match product.ends_with("gate_up") {
        true => Stack::Interleave,
        false => Stack::Concat,
    };
    let mut all = vec![uploader.pack(&parts, stack, false)?];
    let count = (3 * t.gpu.info().l2_bytes).div_ceil(all[0].bytes());
    for _ in 1..count.clamp(1, 96) {
        all.push(uploader.pack(&parts, stack, false)?);
    }
    uploader.finish()?;
    Ok(all)
}

pub(crate) fn trellis(t: &mut Timing) -> Result<()> {
    let scheme_of =
        |code, bits| TrellisScheme::of_bits(code, bits).expect("a scheme of this width");
    let sizes = TrellisSizes {
        rows: 64,
        many: 512,
        inputs: 12288,
        weights: 24576 * 4096,
        gate: 12288,
        experts: CodedExperts::default(),
    };
    let room = TrellisRoom::new(&t.gpu, sizes)?;
    let stream = t.gpu.stream_with(StreamOptions {
        room: Some(room),
        ..StreamOptions::default()
    })?;
    let plain = std::mem::replace(&mut t.stream, stream);
    let schemes = [
        (Code::Octagon, 4.0),
        (Code::Octagon, 3.5),
        (Code::Octagon, 3.0),
        (Code::Octagon, 5.0),
        (Code::Sum, 6.0),
    ];
    for (product, out, inputs) in PRODUCTS {
        let halves = [out / 2, out / 2];
        let heights = match product.ends_with("gate_up") {
            true => &halves[..],
            false => &[out],
        };
        let int4: Vec<Weight> = heights
            .iter()
            .map(|&h| Scheme::Int4.weight(h, inputs))
            .collect();
        let mut all = vec![("int4 g128".to_string(), copies(t, product, &int4)?)];
        for (code, bits) in schemes {
            let scheme = scheme_of(code, bits);
            let parts: Vec<Weight> = heights.iter().map(|&h| weight(scheme, h, inputs)).collect();
            all.push((scheme.to_string(), copies(t, product, &parts)?));
        }
        for (code, bits) in [(Exl3Code::Mcg, 4), (Exl3Code::Mul1, 3)] {
            let scheme = Exl3Scheme::new(code, 2 * bits).expect("a scheme of this width");
            let parts = heights.iter().map(|&h| exl3_weight(scheme, h, inputs));
            let parts: Vec<Weight> = parts.collect();
            all.push((scheme.to_string(), copies(t, product, &parts)?));
        }
        let x = t.gpu.upload("a benchmark", &vec![0.5f32; 16 * inputs])?;
        let half = t.gpu.upload(
            "a benchmark",
            &vec![0x3800u16; 512 * inputs.next_multiple_of(256)],
        )?;
        let gain = t.gpu.upload("a benchmark", &vec![1f32; inputs])?;
        let mut y = t.gpu.zeros::<f32>("a benchmark", 512 * out)?;
        let mut gated = t.gpu.zeros::<u16>("a benchmark", 512 * out)?;
        let mut columns = Columns::new(&t.gpu, 16, inputs)?;
        for (name, weights) in &all {
            let bytes = weights[0].bytes();
            for m in [1, 4, 16] {
                t.chained(
                    &format!("{product} {out} x {inputs} {name}, {m} rows"),
                    bytes,
                    |turn| {
                        let w = &weights[turn % weights.len()];
                        let norm = Norm {
                            gain: &gain,
                            eps: 1e-6,
                        };
                        let output = match product.ends_with("gate_up") {
                            true => GemvOutput::Silu(Some(norm), &mut y),
                            false => GemvOutput::Store(Some(norm), &mut y),
                        };
                        match m {
                            1 => t.stream.gemv(w, &x, output, false),
                            _ => t.stream.gemv_batch(w, &x, output, &mut columns, m, false),
                        }
                    },
                )?;
            }
            t.alone(
                &format!("{product} {out} x {inputs} {name}, 512 rows"),
                bytes,
                |turn| {
                    let w = &weights[turn % weights.len()];
                    let output = match product.ends_with("gate_up") {
                        true => GemmOutput::Silu(&mut gated),
                        false => GemmOutput::Store(&mut y),
                    };
                    t.stream.gemm(w, &half, output, 512)
                },
            )?;
        }
    }
    t.stream = plain;
    Ok(())
}
