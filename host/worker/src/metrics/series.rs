//! Writes series whose values are counted elsewhere, when `/metrics` is read.

use std::fmt::Error;
use std::time::Duration;

use host_core::histogram::Histogram;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Writes series to the text of `/metrics`. A row is a name, a help text and a value.
pub(super) struct Series<'a>(DescriptorEncoder<'a>);

impl<'a> Series<'a> {
    pub(super) fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// One counter for each row.
    pub(super) fn counters<'r>(
        &mut self,
        rows: impl IntoIterator<Item = (&'r str, &'r str, u64)>,
    ) -> Result<(), Error> {
        for (name, help, value) in rows {
            ConstCounter::new(value).encode(self.family(name, help, MetricType::Counter)?)?;
        }
        Ok(())
    }

    /// One gauge for each row.
    pub(super) fn gauges<'r>(
        &mut self,
        rows: impl IntoIterator<Item = (&'r str, &'r str, impl TryInto<i64>)>,
    ) -> Result<(), Error> {
        for (name, help, value) in rows {
            gauge(value).encode(self.family(name, help, MetricType::Gauge)?)?;
        }
        Ok(())
    }

    /// One gauge for each row, in seconds.
    pub(super) fn seconds<'r>(
        &mut self,
        rows: impl IntoIterator<Item = (&'r str, &'r str, Duration)>,
    ) -> Result<(), Error> {
        for (name, help, value) in rows {
            let family = self.family(name, help, MetricType::Gauge)?;
            ConstGauge::new(value.as_secs_f64()).encode(family)?;
        }
        Ok(())
    }

    /// One counter with a value for each set of labels.
    pub(super) fn counter_by<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> Result<(), Error> {
        let mut family = self.family(name, help, MetricType::Counter)?;
        for (labels, value) in values {
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// One gauge with a value for each set of labels.
    pub(super) fn gauge_by<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, impl TryInto<i64>)>,
    ) -> Result<(), Error> {
        let mut family = self.family(name, help, MetricType::Gauge)?;
        for (labels, value) in values {
            gauge(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// A histogram of seconds.
    pub(super) fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) -> Result<(), Error> {
        encode_histogram(histogram, self.family(name, help, MetricType::Histogram)?)
    }

    /// A histogram of seconds for each set of labels.
    pub(super) fn histogram_by<'r, L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        histograms: impl IntoIterator<Item = (L, &'r Histogram)>,
    ) -> Result<(), Error> {
        let mut family = self.family(name, help, MetricType::Histogram)?;
        for (labels, histogram) in histograms {
            encode_histogram(histogram, family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// A histogram of seconds for each set of labels: the buckets' upper bounds and counts, and the sum.
    pub(super) fn buckets_by<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        histograms: impl IntoIterator<Item = (L, Vec<(f64, u64)>, Duration)>,
    ) -> Result<(), Error> {
        let mut family = self.family(name, help, MetricType::Histogram)?;
        for (labels, buckets, sum) in histograms {
            let count = buckets.iter().map(|(_bound, count)| count).sum();
            let mut to = family.encode_family(&labels)?;
            to.encode_histogram::<NoLabelSet>(sum.as_secs_f64(), count, &buckets, None)?;
        }
        Ok(())
    }

    fn family<'s>(
        &'s mut self,
        name: &'s str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'s>, Error> {
        self.0.encode_descriptor(name, help, None, kind)
    }
}

fn gauge(value: impl TryInto<i64>) -> ConstGauge<i64> {
    ConstGauge::new(value.try_into().unwrap_or(i64::MAX))
}

fn encode_histogram(histogram: &Histogram, mut to: MetricEncoder<'_>) -> Result<(), Error> {
    // The encoder adds the counts up.
    let buckets: Vec<(f64, u64)> = histogram.buckets().collect();
    to.encode_histogram::<NoLabelSet>(histogram.sum().as_secs_f64(), histogram.count(), &buckets, None)
}
