//! Lists of GPUs.

use std::fmt;

/// Two or more GPUs that run a model together, by their ordinals, in the order of the parts that they get. A GPU that
/// is listed twice gets two parts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ordinals {
    // Entries from `count` on are 0.
    list: [usize; Ordinals::MOST],
    count: usize,
}

impl Ordinals {
    /// Most GPUs of a list.
    pub const MOST: usize = 8;

    /// The list `ordinals`; `None` unless it has 2 to [`Ordinals::MOST`] entries.
    pub fn new(ordinals: &[usize]) -> Option<Self> {
        let mut list = [0; Self::MOST];
        let count = ordinals.len();
        if count < 2 {
            return None;
        }
        list.get_mut(..count)?.copy_from_slice(ordinals);
        Some(Ordinals { list, count })
    }

    /// The ordinals, in order.
    pub fn as_slice(&self) -> &[usize] {
        &self.list[..self.count]
    }
}

impl fmt::Display for Ordinals {
    /// Writes the name that `--device` takes: `cuda:0,1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, ordinal) in self.as_slice().iter().enumerate() {
            f.write_str(if i == 0 { "cuda:" } else { "," })?;
            write!(f, "{ordinal}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Ordinals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interface::DeviceChoice;

    #[test]
    fn a_list_has_two_to_eight_gpus() {
        let parse = |s: &str| s.parse::<DeviceChoice>();
        for (name, list) in [
            ("cuda:0,1", &[0, 1][..]),
            ("cuda:3,0,3", &[3, 0, 3]),
            ("cuda:0,1,2,3,4,5,6,7", &[0, 1, 2, 3, 4, 5, 6, 7]),
        ] {
            let ordinals = Ordinals::new(list).unwrap();
            assert_eq!(parse(name), Ok(DeviceChoice::Gpus(ordinals)));
            assert_eq!(ordinals.to_string(), name);
            assert_eq!(ordinals.as_slice(), list);
        }
        assert_eq!(parse("cuda:all"), Ok(DeviceChoice::AllGpus));
        assert_eq!(parse("cuda:1"), Ok(DeviceChoice::Cuda(1)));
        for bad in [
            "cuda:",
            "cuda:0,",
            "cuda:,1",
            "cuda:0;1",
            "cuda:0,x",
            "cuda:0,all",
        ] {
            let refused = parse(bad).expect_err(bad);
            assert!(refused.contains("cuda:N"), "{refused}");
        }
        let refused = parse("cuda:0,1,2,3,4,5,6,7,8").unwrap_err();
        assert_eq!(refused, "expected at most 8 GPUs, found 9");
        assert_eq!(Ordinals::new(&[0]), None);
        assert_ne!(Ordinals::new(&[0, 0]), Ordinals::new(&[0, 0, 0]));
    }
}
