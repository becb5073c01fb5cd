//! `nq bench --image`: the time until the first token behind an image.

use super::{BenchArgs, BenchModel};
use crate::flags::{Global, conflict};
use crate::terminal::Terminal;
use nq_answers::SightOptions;
use nq_evals::bench::{self, BenchSpec, ImageSpec, Machine};
use nq_evals::{BenchRow, ImageTimes};
use nq_runtime::{Engine, Tower};
use std::fmt;
use std::sync::Arc;

/// The size of an image in pixels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ImageSize {
    width: u32,
    height: u32,
}

impl fmt::Display for ImageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

/// Longest side of an image: larger ones are made smaller anyway.
const LONGEST: u32 = 8192;

/// Reads a size: `1024x1024`.
pub(super) fn parse(s: &str) -> Result<ImageSize, String> {
    let side = |s: &str| s.parse().ok().filter(|n| (1..=LONGEST).contains(n));
    let sides = s.split_once('x').map(|(w, h)| (side(w), side(h)));
    match sides {
        Some((Some(width), Some(height))) => Ok(ImageSize { width, height }),
        _ => Err(format!(
            "expected width x height, of 1 to {LONGEST} pixels each"
        )),
    }
}

/// Loads what the model sees with.
pub(super) fn tower(
    model: &BenchModel,
    args: &BenchArgs,
    global: &Global,
    terminal: &Terminal,
) -> anyhow::Result<Arc<dyn Tower>> {
    if args.gen_tokens == 0 {
        let why = "--image measures decoding behind an image too: -n is 0";
        return Err(conflict("bench", why));
    }
    match nq_load::tower(
        &model.checkpoint,
        &global.load_options(),
        SightOptions::default().tokens,
        terminal,
    )? {
        Some(tower) => Ok(tower),
        None => Err(nq_answers::Error::Blind(model.name.clone()).into()),
    }
}

/// Measures an image of this size.
pub(super) fn measure(
    size: ImageSize,
    tower: &dyn Tower,
    engine: &dyn Engine,
    spec: &BenchSpec,
    machine: Machine<'_>,
    terminal: &Terminal,
) -> anyhow::Result<BenchRow> {
    let file = nq_pictures::example(size.width, size.height)?;
    let options = SightOptions::default();
    let patches = || {
        let (config, most) = (tower.config(), options.tokens);
        let made = nq_pictures::patches(&file, config, most, &options.limits, &|| false);
        made.map_err(|e| nq_evals::Error::Text(e.to_string()))
    };
    let image = ImageSpec {
        name: &size.to_string(),
        patches: &patches,
        tower,
    };
    Ok(bench::image(engine, &image, spec, machine, terminal)?)
}

/// A line about the times of an image.
pub(super) fn line(test: &str, times: &ImageTimes) -> String {
    format!(
        "{test}: {} tokens; the first token behind it after {:.1} ms: {:.1} for its pixels, {:.1} for encoding it, {:.1} \
         for the prompt",
        times.tokens, times.first_token_ms, times.pixels_ms, times.encoding_ms, times.prompt_ms
    )
}
