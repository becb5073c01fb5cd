//! The texts of a run: sampled from the source or read from files, once.

use super::job::Job;
use super::state::{State, StoredText, save};
use crate::calibration::{self, CalibrationSource, Prompter, Sequences};
use crate::error::{Error, Result};
use crate::quality;
use nq_formats::Progress;
use nq_formats::nq::Writer;

/// XORed into the seed of calibration text to get that of held-out text.
const HELD_OUT: u64 = 0x9E37_79B9_7F4A_7C15;
/// XORed into it to get that of the text for measuring sensitivity.
const PROBE: u64 = 0xD1B5_4A32_D192_ED03;

impl Job<'_> {
    /// Calibration text and held-out text, from the state or made now. Each is `None` if it is not
    /// needed.
    pub(super) fn texts(
        &self,
        writer: &Writer,
        state: &mut State,
    ) -> Result<(Option<Sequences>, Option<Sequences>)> {
        let o = self.options;
        let (n, length) = self.shape();
        let mut calibration = state.calibration.as_ref().and_then(StoredText::sequences);
        let mut held_out = state.held_out.as_ref().and_then(StoredText::sequences);
        let sample_calibration =
            n > 0 && calibration.is_none() && o.calibration == CalibrationSource::SelfSampled;
        let sample_held_out = self.samples_held_out() && held_out.is_none();
        let mut prompter = None;
        if n > 0 || sample_held_out {
            prompter = Some(self.prompter()?);
        }
        let Some(prompter) = prompter else {
            return Ok((None, held_out));
        };
        if let (CalibrationSource::File(path), None) = (&o.calibration, &calibration)
            && n > 0
        {
            let text = calibration::read(path, &prompter, n, length)?;
            if text.ids.len() < n {
                self.progress.note(&format!(
                    "{}: calibrated on all of its {} tokens, fewer than the {} requested",
                    path.display(),
                    text.tokens(),
                    self.calib_tokens()
                ));
            }
            calibration = Some(text);
        }
        if let (CalibrationSource::Prompts { name, prompts }, 1..) = (&o.calibration, n) {
            // The state has no rows of images: they were made anew.
            let text = calibration::seen(name, prompts, self.calib_tokens(), length)?;
            if let Some(before) = calibration.filter(|before| before.ids != text.ids) {
                return Err(Error::Request {
                    what: "calibration",
                    expected: format!("the chats of {} with which the run began", before.name),
                    found: format!("others in {name}"),
                });
            }
            calibration = Some(text);
        }
        if sample_calibration || sample_held_out {
            let engine = self.sampling_engine(state)?;
            let sample = |stage, n, length, seed| {
                calibration::sample(
                    engine.as_ref(),
                    &prompter,
                    stage,
                    n,
                    length,
                    seed,
                    &self.progress,
                )
            };
            if sample_calibration {
                calibration = Some(sample("sampling calibration text", n, length, o.seed)?);
            }
            if sample_held_out {
                let (n, length) = quality::held_out_shape(self.config(), self.eval_tokens());
                let seed = o.seed ^ HELD_OUT;
                held_out = Some(sample("sampling held-out text", n, length, seed)?);
            }
        }
        if state.calibration.is_none() || state.held_out.is_none() {
            state.calibration = calibration.as_ref().map(StoredText::new);
            state.held_out = held_out.as_ref().map(StoredText::new);
            save(writer, state)?;
        }
        Ok((calibration, held_out))
    }

    /// Text for measuring sensitivity, neither calibrated on nor used for measuring quality.
    pub(super) fn probe_text(
        &self,
        prompter: &Prompter,
        n: usize,
        length: usize,
        state: &mut State,
    ) -> Result<Sequences> {
        let engine = self.sampling_engine(state)?;
        calibration::sample(
            engine.as_ref(),
            prompter,
            "sampling text to probe with",
            n,
            length,
            self.options.seed ^ PROBE,
            &self.progress,
        )
    }

    pub(super) fn prompter(&self) -> Result<Prompter> {
        let eos = self.checkpoint.eos_token_ids();
        let vocab = self.config().vocab_size;
        Prompter::new(self.checkpoint.files(), vocab, eos, &self.progress)
    }
}
