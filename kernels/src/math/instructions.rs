//! Instruction sets that the kernels are compiled for.

use super::lanes::{Lanes, PortableLanes, Vector};
#[cfg(target_arch = "x86_64")]
use super::lanes::{Ymm, Zmm};

/// Instructions that the kernels use. A value exists only where the CPU has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instructions(pub(super) Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Plain Rust.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512F, with AVX2 and FMA for vectors of eight lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Instructions {
    /// All instructions that this CPU has, the best first. Plain Rust is the last of them.
    #[must_use]
    pub fn available() -> Vec<Self> {
        Self::found().collect()
    }

    /// The best instructions that this CPU has.
    pub(super) fn best() -> Self {
        Self::found().next().unwrap_or(Self(Level::Portable))
    }

    /// Plain Rust.
    pub(super) const PORTABLE: Self = Self(Level::Portable);

    fn found() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let found = {
            let avx2 =
                std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
            let avx512 = avx2 && std::arch::is_x86_feature_detected!("avx512f");
            [(avx512, Level::Avx512), (avx2, Level::Avx2), (true, Level::Portable)]
        };
        #[cfg(not(target_arch = "x86_64"))]
        let found = [(true, Level::Portable)];
        found.into_iter().filter(|(has, _)| *has).map(|(_, level)| Self(level))
    }
}

impl std::fmt::Display for Instructions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "AVX-512",
        })
    }
}

/// The vectors that a kernel is compiled with.
pub(super) trait InstructionSet {
    /// Eight lanes, for sums whose order the lanes define.
    type Lanes: Lanes;
    /// The widest vector, for sums that have one chain per element.
    type Wide: Vector;
}

pub(super) struct Portable;

impl InstructionSet for Portable {
    type Lanes = PortableLanes;
    type Wide = PortableLanes;
}

/// Used only in functions that `dispatch!` enters at [`Level::Avx2`] or [`Level::Avx512`].
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2;

#[cfg(target_arch = "x86_64")]
impl InstructionSet for Avx2 {
    type Lanes = Ymm;
    type Wide = Ymm;
}

/// Used only in functions that `dispatch!` enters at [`Level::Avx512`].
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx512;

#[cfg(target_arch = "x86_64")]
impl InstructionSet for Avx512 {
    type Lanes = Ymm;
    type Wide = Zmm;
}

/// Compiles one generic kernel body per instruction set and calls the right one.
macro_rules! dispatch {
    ($instructions:expr, $body:ident :: <$($kind:ty),*> ($($argument:ident : $type:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn avx2($($argument: $type),*) {
            $body::<$crate::math::instructions::Avx2 $(, $kind)*>($($argument),*)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx2,fma")]
        fn avx512($($argument: $type),*) {
            $body::<$crate::math::instructions::Avx512 $(, $kind)*>($($argument),*)
        }
        match $instructions.0 {
            // SAFETY: `Instructions` of this level exist only where the CPU was found to have AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            $crate::math::instructions::Level::Avx2 => unsafe { avx2($($argument),*) },
            // SAFETY: `Instructions` of this level exist only where the CPU was found to have AVX-512F, AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            $crate::math::instructions::Level::Avx512 => unsafe { avx512($($argument),*) },
            $crate::math::instructions::Level::Portable => {
                $body::<$crate::math::instructions::Portable $(, $kind)*>($($argument),*)
            }
        }
    }};
}
pub(super) use dispatch;
