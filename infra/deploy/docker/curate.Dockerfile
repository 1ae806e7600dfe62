# Gives every ticket its verdict.
#   docker run rollflow-curate --run s3://bucket/runs/RUN
FROM rollflow-base
ENTRYPOINT ["rollflow", "role", "curate"]
CMD ["--help"]
