//! Numbers of pages, as admission counts them.

/// Pages of both [components](crate::pool::Component).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pages {
    pub full: usize,
    pub window: usize,
}

impl std::ops::AddAssign for Pages {
    fn add_assign(&mut self, other: Self) {
        self.full += other.full;
        self.window += other.window;
    }
}

impl std::ops::Add for Pages {
    type Output = Pages;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl std::iter::Sum for Pages {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Pages::default(), std::ops::Add::add)
    }
}
