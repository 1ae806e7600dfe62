# Holds windows of data against suites of expectations.
#   docker run rollflow-audit --run s3://bucket/runs/RUN
FROM rollflow-base
ENTRYPOINT ["rollflow", "role", "audit"]
CMD ["--help"]
