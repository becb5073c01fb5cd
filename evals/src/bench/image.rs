//! An image before an answer: its pixels, its encoding, the rest of the prompt, and decoding behind it.

use super::{BenchSpec, Machine, RandomTokens, Sample, decode_on, feed};
use crate::error::{Error, Result};
use crate::report::{BenchRow, ImageTimes};
use crate::stats;
use crate::windows::StageGuard;
use nq_formats::{Progress, Unit};
use nq_model::vision::Patches;
use nq_runtime::{Engine, PlacedImage, Tower};
use std::sync::Arc;
use std::time::Instant;

/// An image to measure with.
pub struct ImageSpec<'a> {
    /// What the test is called after it: `1024x1024`.
    pub name: &'a str,
    /// Makes its patches of a file.
    pub patches: &'a dyn Fn() -> Result<Patches>,
    /// Makes rows of them.
    pub tower: &'a dyn Tower,
}

/// `image`: the time until the first token of a prompt of an image, and `gen_tokens` decode steps behind it, of one
/// sequence.
///
/// # Errors
/// Errors of [`super::decode`]; those of `image`.
pub fn image(
    engine: &dyn Engine,
    image: &ImageSpec<'_>,
    spec: &BenchSpec,
    machine: Machine<'_>,
    progress: &dyn Progress,
) -> Result<BenchRow> {
    let (c, n) = (image.tower.config(), spec.gen_tokens);
    if n == 0 {
        return Err(Error::Spec {
            what: "tokens behind an image",
            expected: "at least 1".into(),
            found: "0".into(),
        });
    }
    let tokens = (image.patches)()?.grid.tokens(c.spatial_merge_size);
    let pads = std::iter::repeat_n(c.tokens.pad, tokens);
    let ids: Vec<u32> = [c.tokens.start]
        .into_iter()
        .chain(pads)
        .chain([c.tokens.end])
        .collect();
    let alone = BenchSpec { batch: 1, ..*spec };
    let mut session = alone.session(engine, ids.len() + n, progress)?;
    let mut random = RandomTokens::new(engine, 6);
    let test = format!("image{}", image.name);
    let _stage = StageGuard::begin(progress, &test, spec.repeats as u64 + 1, Unit::Items);
    let (mut seconds, mut step_ms) = (Vec::new(), Vec::new());
    let mut laps: [Vec<f64>; 3] = Default::default();
    let mut read_gb_s = vec![(machine.read_gb_s)()?];
    for repeat in 0..=spec.repeats {
        let mut start = Instant::now();
        let mut lap = || {
            let ms = 1e3 * start.elapsed().as_secs_f64();
            start = Instant::now();
            ms
        };
        let patches = (image.patches)()?;
        let pixels = lap();
        let rows = Arc::new(image.tower.encode(&patches)?);
        let encoding = lap();
        let at = spec.depth + 1;
        let placed = [PlacedImage { at, image: rows }];
        session.session.show(0, &placed)?;
        feed(session.session.as_mut(), std::slice::from_ref(&ids))?;
        let prompt = lap();
        let steps = decode_on(
            session.session.as_mut(),
            &[random.next()],
            n,
            spec.sampling(repeat),
        )?;
        if repeat > 0 {
            (laps.iter_mut().zip([pixels, encoding, prompt])).for_each(|(all, ms)| all.push(ms));
            seconds.push(steps.iter().sum::<f64>() / 1e3);
            step_ms.extend(steps);
            read_gb_s.push((machine.read_gb_s)()?);
        }
        session.rewind()?;
        progress.advance(1);
    }
    let median = |ms: &[f64]| stats::quantile(&stats::sorted(ms.iter().copied()), 0.5);
    let firsts: Vec<f64> = (0..spec.repeats)
        .map(|i| laps.iter().map(|all| all[i]).sum())
        .collect();
    let sample = Sample {
        test,
        tokens: n,
        passes: n,
        seconds,
        step_ms,
        read_gb_s,
        choices: None,
    };
    let depth = spec.depth + ids.len();
    let mut row = sample.row(engine, &BenchSpec { depth, ..alone }, machine);
    row.image = Some(ImageTimes {
        tokens,
        pixels_ms: median(&laps[0]),
        encoding_ms: median(&laps[1]),
        prompt_ms: median(&laps[2]),
        first_token_ms: median(&firsts),
    });
    Ok(row)
}
