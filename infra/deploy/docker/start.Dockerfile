# Makes version 0: warm-starts a tiny policy, or imports a model.
#   docker run rollflow-start --run s3://bucket/runs/RUN
FROM rollflow-base
ENTRYPOINT ["rollflow", "role", "start"]
CMD ["--help"]
