# Scores finished groups with the verifiers of their envs.
#   docker run rollflow-reward --run s3://bucket/runs/RUN
FROM rollflow-base
ENTRYPOINT ["rollflow", "role", "reward"]
CMD ["--help"]
