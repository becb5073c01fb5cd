//! States as bytes on the host, for files: layer by layer the matrices, then the inputs of the convolution.

use super::{DELTA_DIM, DeviceStates, INPUTS};
use crate::driver::{Buffer, Stream};
use nq_kernels::{Error, Result};

impl DeviceStates {
    /// Bytes of the states at a place, in all layers.
    pub(crate) fn place_bytes(&self) -> usize {
        4 * self.shape.layers * self.parts().into_iter().sum::<usize>()
    }

    /// Values of a place in a layer: matrices, inputs.
    fn parts(&self) -> [usize; 2] {
        let d = &self.shape.delta;
        [d.value_heads * DELTA_DIM * DELTA_DIM, INPUTS * d.channels()]
    }

    /// Where the values of `place` begin: of each layer both parts, and their number.
    fn of_place(&self, place: usize) -> impl Iterator<Item = [(usize, usize); 2]> + use<> {
        let (parts, places) = (self.parts(), self.shape.places);
        (0..self.shape.layers).map(move |layer| parts.map(|n| ((layer * places + place) * n, n)))
    }

    fn check_place(&self, place: usize) -> Result<()> {
        match place < self.shape.places {
            true => Ok(()),
            false => Err(Error::Shape {
                op: "states",
                what: "places",
                expected: format!("{} at most", self.shape.places),
                found: place.to_string(),
            }),
        }
    }
}

impl Stream {
    /// Appends the states at `place` to `out`, once the stream's work is done: [`DeviceStates::place_bytes`].
    ///
    /// # Errors
    /// [`Error::Shape`] for a place that does not exist; errors of the driver.
    pub(crate) fn read_states(
        &self,
        states: &DeviceStates,
        place: usize,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        states.check_place(place)?;
        self.synchronize()?;
        let mut values = Vec::new();
        let mut read = |from: &Buffer<f32>, (at, n): (usize, usize)| -> Result<()> {
            values.resize(n, 0.0);
            from.read(at, &mut values)?;
            out.extend_from_slice(bytemuck::cast_slice(&values));
            Ok(())
        };
        for [matrices, inputs] in states.of_place(place) {
            read(&states.matrices, matrices)?;
            read(&states.inputs, inputs)?;
        }
        Ok(())
    }

    /// Makes the states at `place` those of `bytes`, once the stream's work is done.
    ///
    /// # Errors
    /// [`Error::Shape`] for a place that does not exist, and unless there are [`DeviceStates::place_bytes`] bytes;
    /// errors of the driver.
    pub(crate) fn write_states(
        &self,
        states: &mut DeviceStates,
        place: usize,
        bytes: &[u8],
    ) -> Result<()> {
        states.check_place(place)?;
        if bytes.len() != states.place_bytes() {
            return Err(Error::Shape {
                op: "states",
                what: "bytes",
                expected: states.place_bytes().to_string(),
                found: bytes.len().to_string(),
            });
        }
        self.synchronize()?;
        let (mut values, mut rest) = (Vec::new(), bytes);
        let mut write = |to: &mut Buffer<f32>, (at, n): (usize, usize)| -> Result<()> {
            let (part, others) = rest.split_at(4 * n);
            rest = others;
            values.resize(n, 0f32);
            bytemuck::cast_slice_mut(&mut values).copy_from_slice(part);
            to.write(at, &values)
        };
        for [matrices, inputs] in states.of_place(place) {
            write(&mut states.matrices, matrices)?;
            write(&mut states.inputs, inputs)?;
        }
        Ok(())
    }
}
